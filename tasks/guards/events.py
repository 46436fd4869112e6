"""What guards tell."""

from __future__ import annotations

from dataclasses import dataclass

from storage.runs.commit_log import GuardRecord
from tasks.run.events import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardActed(Event):
    """A metric of a step was beyond the bound of a guard, which does something."""

    step: int
    record: GuardRecord
