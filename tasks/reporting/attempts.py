"""One try of a stage: what the dashboard, the log and the commit tell of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engines.workers.pool import Assignment
from storage.objects.json_values import JsonValue


@dataclass(slots=True)
class Attempt:
    """One try of a stage's call: where it went and how it ended."""

    step: int
    stage: str
    shard: int | None  # counted from 1; None where a stage is one call
    number: int  # 1 is the first try
    started: float  # seconds since the epoch
    ended: float = 0.0
    error: str = ""  # empty for success
    assignment: Assignment = field(default_factory=Assignment)

    def record(self) -> dict[str, JsonValue]:
        """A plain dict, for a commit."""
        return {
            "stage": self.stage,
            "shard": self.shard,
            "number": self.number,
            "worker": self.assignment.worker,
            "started": self.started,
            "seconds": self.ended - self.started,
            "error": self.error,
            "worker_seconds": {**self.assignment.held.seconds},
        }
