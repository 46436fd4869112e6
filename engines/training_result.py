"""What comes of putting a training batch together; made on a worker, read in the flow process.

Apart from the work itself (engines/training_batch.py), which needs torch: the flow process has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from storage.refs import BatchRef


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBatch:
    """The samples of a step that train."""

    ref: BatchRef  # the kept samples with advantages
    trained: int  # groups of which a sample is kept
    filtered: int  # groups left out by the algorithm's selection
    dropped: dict[str, int]  # groups left out for a failure, by reason
    metrics: dict[str, float] = field(default_factory=dict)


class NothingToTrain(RuntimeError):
    """No sample of a step is left for the update."""
