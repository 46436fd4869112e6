"""What the parts of a run know of it, so that none of them imports the run (tasks/run/run.py)."""

from __future__ import annotations

import threading
from typing import Protocol

from configs.grpo import GRPOConfig
from engines.workers.device_time import DeviceTime
from storage.objects.store import Store
from storage.prompts.source import PromptSource
from storage.runs.run_store import Origin, RunStore
from tasks.run.attempt_log import AttemptLog
from tasks.run.attempts import Attempt
from tasks.run.events import Event


class Attempts(Protocol):
    """Where tries are recorded (tasks/run/attempt_log.py)."""

    def add(self, *attempts: Attempt) -> None:
        """Record some."""


class AttemptsView(Protocol):
    """Whose calls are recorded as attempts."""

    name: str
    device_time: DeviceTime

    @property
    def attempts(self) -> Attempts:
        """Where they are recorded."""

    def tell(self, event: Event) -> None:
        """Let those hear a fact who listen."""


class Caller(AttemptsView, Protocol):
    """On whose behalf engines are started and called: a run, or what evaluates its versions later."""

    @property
    def attempts(self) -> AttemptLog:
        """By step."""

    config: GRPOConfig
    store: Store
    files: RunStore
    epoch: int
    cancelled: threading.Event


class RunView(Caller, Protocol):
    """A run; see the attributes of the same names in tasks.run.run.Run."""

    origin: Origin | None
    start: int
    source: PromptSource
    fresh: list[int]

    @property
    def head(self) -> int:
        """The last committed step."""
