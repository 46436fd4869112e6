"""What is handed to a run with which it tells and asks those who show it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from storage.runs.commit_log import Commit
from tasks.run.events import Listeners
from tasks.run.facts import RunFacts


class Tracking(Protocol):
    """What the run asks the server that tracks it, from where the engines are ready on."""

    @property
    def registered(self) -> Mapping[int, str | None]:
        """Policy version -> its number in the registry, None of one that waits to be registered."""

    def retained(self) -> Collection[int]:
        """The registered policy versions that retention leaves."""

    def let_go(self, versions: Collection[int]) -> Collection[int]:
        """Those of these policy versions that may be removed now."""

    def removed(self, versions: Collection[int]) -> None:
        """Have the registry say that the files of these policy versions are gone."""

    @property
    def model_name(self) -> str:
        """Name of the run's model in the registry."""

    @property
    def link(self) -> str:
        """Where a person sees the run."""

    def tag(self, name: str, value: str) -> None:
        """Write a tag on the run's page."""

    def register(self, commit: Commit) -> str:
        """Put the policy version that a step made into the registry; its number there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reports:
    """See the module's docstring."""

    listeners: Listeners
    tracking: Tracking


Reporting: TypeAlias = Callable[[RunFacts], Reports]
