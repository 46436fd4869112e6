"""What a feature's hooks know of a run; see the attributes of the same names in tasks.run.run.Run."""

from __future__ import annotations

from typing import Protocol

from storage.runs.commit_log import Commit
from tasks.run.run_view import RunView
from tasks.run.staleness_gate import Gate


class FeatureView(RunView, Protocol):
    """A run between two steps, and after the last one."""

    flow: str
    measured: dict[str, float]

    @property
    def last(self) -> Commit | None:
        """The commit of the step before the next one."""

    @property
    def gate(self) -> Gate:
        """What its steps wait for."""
