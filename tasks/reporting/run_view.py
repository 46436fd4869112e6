"""What a run is and where it stands, as the parts of a run see it.

A run (tasks/run/run.py) is made of its engines, its page in MLflow and its artifacts. These know of
it only what is here, so that none of them imports the run.
"""

from __future__ import annotations

import threading
from typing import Protocol

from configs.grpo import GRPOConfig
from engines.workers.device_time import DeviceTime
from storage.objects.store import Store
from storage.prompts.cursor import Cursor
from storage.prompts.source import PromptSource
from storage.runs.commit_log import Commit
from storage.runs.origins import Origin
from storage.runs.run_store import RunStore
from tasks.reporting.attempt_log import AttemptLog
from tasks.reporting.attempts import Attempt
from tasks.reporting.progress import Progress, Terminal


class Attempts(Protocol):
    """Where tries are recorded (tasks/reporting/attempt_log.py)."""

    def add(self, *attempts: Attempt) -> None:
        """Record some."""


class AttemptsView(Protocol):
    """Whose calls are recorded as attempts."""

    name: str
    progress: Progress
    device_time: DeviceTime

    @property
    def attempts(self) -> Attempts:
        """Where they are recorded."""


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
    terminal: Terminal


class RunView(Caller, Protocol):
    """Facts of a run; see the attributes of the same names in tasks.run.run.Run."""

    source: PromptSource
    origin: Origin | None
    start: int

    @property
    def head(self) -> int:
        """The last committed step."""

    @property
    def last(self) -> Commit | None:
        """The commit of the step before the next one."""

    @property
    def cursor(self) -> Cursor:
        """Where the next step draws."""

    def snapshot_due(self, step: int, cursor: Cursor, carried: int) -> bool:
        """Whether the trainer's state is stored after a step that drew up to `cursor`."""
