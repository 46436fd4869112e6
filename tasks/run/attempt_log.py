"""What was tried since the last commit, by steps and by evaluations, which have no step."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace

from tasks.run.attempts import Attempt

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
            for one in attempts:
                self._by_step.setdefault(one.step, []).append(one)

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
            made = [replace(one, step=step) for one in self._evaluations]
            self._by_step.setdefault(step, []).extend(made)
            self._evaluations.clear()

    def committed(self, step: int) -> None:
        """Forget a step and those before it."""
        with self._lock:
            for before in [one for one in self._by_step if one <= step]:
                del self._by_step[before]


class EvaluationLog:
    """What was tried for one evaluation; its caller's log has it too. For several threads."""

    def __init__(self, caller: AttemptLog) -> None:
        self._caller = caller
        self._made: list[Attempt] = []

    def add(self, *attempts: Attempt) -> None:
        """Whatever their step."""
        for one in attempts:
            self._made.append(one)
            self._caller.add_evaluation(one)

    def worker_seconds(self, shard: int | None) -> dict[str, float]:
        """Pool -> seconds that the tries of a shard had of its workers; None: those of no shard."""
        return summed(one.assignment.held.seconds for one in self._made if one.shard == shard)


def summed(worker_seconds: Iterable[dict[str, float]]) -> dict[str, float]:
    """Pool -> seconds."""
    found: dict[str, float] = {}
    for one in worker_seconds:
        for pool, seconds in one.items():
            found[pool] = found.get(pool, 0.0) + seconds
    return found
