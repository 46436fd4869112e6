"""The tries of stages' calls: what is recorded of each, by steps and by evaluations."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

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
            attempts, self._attempts = self._attempts or [], None
        if not attempts:
            return ""
        seconds = [attempt.ended - attempt.started for attempt in attempts]
        shards = {
            attempt.shard: attempt.number
            for attempt in sorted(attempts, key=lambda attempt: attempt.number)
        }
        again = [f"{shard} ({number})" for shard, number in sorted(shards.items()) if number > 1]
        return (
            f"{attempts[0].stage}: {len(attempts)} calls for {len(shards)} shards on "
            f"{', '.join(sorted({attempt.assignment.worker for attempt in attempts}))} took "
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


ATTEMPTS = 4


def backoff(attempt: int) -> float:
    """Seconds between a failed attempt, counted from 1, and the next."""
    return float(2 ** (attempt - 1))


EVALUATION = "evaluation"  # stage of all that evaluations do, in the commit that counts it


class AttemptLog:
    """What was tried for steps that are not committed, and by evaluations. For several threads.

    An evaluation is of no step: what it tried goes with the step that is committed next.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_step: dict[int, list[Attempt]] = {}
        self._evaluations: list[Attempt] = []

    def __len__(self) -> int:
        return len(self._by_step)

    def add(self, *attempts: Attempt) -> None:
        """Of steps."""
        with self._lock:
            for attempt in attempts:
                self._by_step.setdefault(attempt.step, []).append(attempt)

    def add_evaluation(self, attempt: Attempt) -> None:
        """Of an evaluation."""
        with self._lock:
            self._evaluations.append(replace(attempt, stage=EVALUATION))

    def of(self, step: int) -> list[Attempt]:
        """Those of a step, in the order in which they ended."""
        with self._lock:
            return list(self._by_step.get(step, ()))

    def charge(self, step: int) -> None:
        """From now on what evaluations tried is a part of a step: of the one that is committed."""
        with self._lock:
            attempts = [replace(evaluation, step=step) for evaluation in self._evaluations]
            self._by_step.setdefault(step, []).extend(attempts)
            self._evaluations.clear()

    def committed(self, step: int) -> None:
        """Forget a step and those before it."""
        with self._lock:
            for before in [number for number in self._by_step if number <= step]:
                del self._by_step[before]


class EvaluationLog:
    """What was tried for one evaluation; its caller's log has it too. For several threads."""

    def __init__(self, caller: AttemptLog) -> None:
        self._caller = caller
        self._made: list[Attempt] = []

    def add(self, *attempts: Attempt) -> None:
        """Whatever their step."""
        for attempt in attempts:
            self._made.append(attempt)
            self._caller.add_evaluation(attempt)

    def worker_seconds(self, shard: int | None) -> dict[str, float]:
        """Pool -> seconds that the tries of a shard had of its workers; None: those of no shard."""
        return summed(
            attempt.assignment.held.seconds for attempt in self._made if attempt.shard == shard
        )


def summed(worker_seconds: Iterable[dict[str, float]]) -> dict[str, float]:
    """Pool -> seconds."""
    seconds_by_pool: dict[str, float] = {}
    for by_pool in worker_seconds:
        for pool, seconds in by_pool.items():
            seconds_by_pool[pool] = seconds_by_pool.get(pool, 0.0) + seconds
    return seconds_by_pool
