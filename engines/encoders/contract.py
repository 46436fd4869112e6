"""What the flow process asks of the engines of progress rewards. Free of torch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.workers.engine import Engine

if TYPE_CHECKING:
    from configs.srpo import ProgressConfig
    from engines.data.contract import SampleFailure
    from storage.batches.refs import BatchRef


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressResult:
    """The rewards of a step's N episodes."""

    ref: BatchRef  # [N] reward, status, score/progress, extra/progress/measured
    # A row for each cluster of successes: task, centre, members (sample_id), encoder. None: there is
    # no success.
    clusters: BatchRef | None
    failures: tuple[SampleFailure, ...]  # samples without an embedding, not those failed before
    metrics: dict[str, float]


class ProgressScorer(Engine):
    """Makes rewards for progress."""

    @abstractmethod
    def progress(
        self, prompts: BatchRef, samples: BatchRef, settings: ProgressConfig, out_key: str
    ) -> ProgressResult:
        """Replace the rewards of a step's samples by those for progress."""


class EpisodeEncoder(Engine):
    """Holds the encoder of what episodes see."""

    @abstractmethod
    def embed(self, samples: BatchRef, frames: BatchRef | None, out_key: str) -> BatchRef:
        """Write the embeddings of the episodes of a shard.

        samples: [N], with their first frames. frames: of their turns. Writes embedding [N, D], NaN
        where there is none, which embedding_error explains, and the encoder's digest.
        """
