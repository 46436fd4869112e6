"""What the flow process asks of a critic. Free of torch.

Kept by engines/critic/engine.py. Every rank gets the same arguments.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from engines.train.contract import ColumnsResult, TrainEngine
from engines.workers.engine import joined_by

if TYPE_CHECKING:
    from storage.batches.refs import BatchRef


class CriticEngine(TrainEngine):
    """What is trained to say what each state is worth; it has no log-probs and no versions."""

    @abstractmethod
    @joined_by(ColumnsResult.together)
    def values(self, batch: BatchRef, out_key: str) -> ColumnsResult:
        """Write the critic's value of every response token; all rows, in their order."""
