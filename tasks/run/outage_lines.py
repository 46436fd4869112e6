"""The line that people read while a run waits for workers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from prefect.context import TaskRunContext
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from engines.workers.cluster import Say, Wait
from tasks.run.events import Event, Note
from tasks.run.retries import ATTEMPTS, backoff


def outage_lines(tell: Callable[[Event], object]) -> Say:
    """Tells a wait on the terminal, by `tell`, and in the log of the task that waits."""

    def say(wait: Wait) -> None:
        context = TaskRunContext.get()
        tries = 1 if context is None else ATTEMPTS - context.task_run.run_count + 1
        line = sentence(wait, tries)
        tell(Note(text=line, warning=True))
        with contextlib.suppress(MissingContextError):
            get_run_logger().warning("%s", line)

    return say


def sentence(wait: Wait, tries: int = 1) -> str:
    """What is waited for, since when and until when; `tries`: of the task, this one included."""
    until = wait.until + sum(
        wait.limit + backoff(ATTEMPTS - left) for left in range(tries - 1, 0, -1)
    )
    cause = f" ({wait.cause})" if wait.cause else ""
    return (
        f"{wait.pool}: {wait.there} of {wait.needed} workers since {_clock(wait.since)}, gives up "
        f"at {_clock(until)}{cause}"
    )


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))
