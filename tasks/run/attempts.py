"""One try of a stage: what the dashboard, the log and the commit tell of it."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from prefect.logging import get_run_logger

from engines.workers.pool import Assignment
from storage.objects.documents import JsonValue


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

    def log(self) -> None:
        """A line in the log of the task run, or a part of one: see `logged_together`."""
        together = _TOGETHER.get()
        if self.error or together is None or not together.took(self):
            where = self.assignment.worker or "the train workers"
            get_run_logger().log(
                logging.WARNING if self.error else logging.INFO,
                "%s %d on %s took %.2f s%s",
                "Attempt" if self.shard is None else f"Shard {self.shard}, {self.stage}, attempt",
                self.number,
                where,
                self.ended - self.started,
                f" and failed: {self.error}" if self.error else "",
            )


class _Together:
    """Attempts that went well and are to be logged in one line, as long as that is not written."""

    def __init__(self) -> None:
        self._attempts: list[Attempt] | None = []
        self._lock = threading.Lock()

    def took(self, attempt: Attempt) -> bool:
        with self._lock:
            if self._attempts is not None:
                self._attempts.append(attempt)
            return self._attempts is not None

    def line(self) -> str:
        """Of all that were taken; empty where there are none."""
        with self._lock:
            found, self._attempts = self._attempts or [], None
        if not found:
            return ""
        seconds = [one.ended - one.started for one in found]
        shards = {one.shard: one.number for one in sorted(found, key=lambda one: one.number)}
        again = [f"{shard} ({number})" for shard, number in sorted(shards.items()) if number > 1]
        return (
            f"{found[0].stage}: {len(found)} calls for {len(shards)} shards on "
            f"{', '.join(sorted({one.assignment.worker for one in found}))} took "
            f"{min(seconds):.2f} to {max(seconds):.2f} s"
            + (f"; shards that were tried again (attempt): {', '.join(again)}" if again else "")
        )


_TOGETHER: contextvars.ContextVar[_Together | None] = contextvars.ContextVar(
    "together", default=None
)


@contextlib.contextmanager
def logged_together() -> Iterator[None]:
    """One line in the task run's log for all attempts of the body that go well.

    A line of its own for each of many shards costs the flow a millisecond, and the server too. The
    step's page has them all.
    """
    together = _Together()
    before = _TOGETHER.set(together)
    try:
        yield
    finally:
        _TOGETHER.reset(before)
        if line := together.line():
            get_run_logger().info("%s", line)
