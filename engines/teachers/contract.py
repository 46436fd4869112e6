"""What the flow process asks of a teacher whose engines are each whole. Free of torch."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from engines.workers.engine import Engine

if TYPE_CHECKING:
    from storage.batches.refs import BatchRef


class TeacherEngine(Engine):
    """Scores samples by a teacher's model."""

    @abstractmethod
    def digest(self) -> str:
        """Digest of the weights that are held. EngineDead where they are gone."""

    @abstractmethod
    def teach(self, batch: BatchRef, out_key: str, top_k: int, digest: str) -> BatchRef:
        """Write teacher_logprobs of all rows [N], in their order; with `top_k` the likeliest words.

        digest: of the weights by which they are to be; another is a WeightMismatch.
        """
