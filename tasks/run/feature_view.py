"""What a feature's hooks know of a run; see the attributes of the same names in tasks.run.run.Run."""

from __future__ import annotations

from typing import Protocol

from storage.runs.commit_log import Commit
from tasks.run.events import Listeners
from tasks.run.reports import Tracking
from tasks.run.run_view import RunView
from tasks.run.staleness_gate import Gate


class Closable(Protocol):
    """Engines, of which a hook needs no more."""

    def close(self) -> None:
        """End them and their workers."""


class FeatureView(RunView, Protocol):
    """A run between two steps, and after the last one."""

    flow: str
    measured: dict[str, float]
    listeners: Listeners
    tracking: Tracking

    @property
    def last(self) -> Commit | None:
        """The commit of the step before the next one."""

    @property
    def last_weights(self) -> str:
        """Address of the last policy version."""

    @property
    def engines(self) -> Closable:
        """Those of the run."""

    @property
    def gate(self) -> Gate:
        """What its steps wait for."""
