"""How long calls hold workers and, with them, the devices that the workers have.

A worker may run several calls at once, of several stages and steps. Its seconds are then shared among
them evenly, so that what all calls held never adds up to more than the workers were there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class HeldSeconds:
    """What the calls of an attempt held, the failed ones too; it grows while they run."""

    seconds: dict[str, float] = field(default_factory=dict)  # worker-seconds by pool


@dataclass(slots=True)
class _Worker:
    holders: list[HeldSeconds] = field(default_factory=list)  # one entry for each call that runs
    since: float = 0.0  # when the holders last changed, on the clock


class DeviceTime:
    """Shares each worker's seconds among the calls that hold it. Safe to use from several threads.

    Of rollout-0 with calls at 0 to 6 s and 4 to 8 s, the first held 5 s and the second 3 s.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock  # seconds
        self._lock = threading.Lock()
        self._workers: dict[tuple[str, str], _Worker] = {}  # by pool and name; those that are held

    @contextlib.contextmanager
    def held(self, pool: str, workers: Iterable[str], holder: HeldSeconds) -> Iterator[None]:
        """During the body a call of `holder` holds these workers of a pool."""
        names = [(pool, worker) for worker in workers]
        with self._lock:
            for name in names:
                self._count(name)
                self._workers[name].holders.append(holder)
        try:
            yield
        finally:
            with self._lock:
                for name in names:
                    self._count(name)
                    self._workers[name].holders.remove(holder)
                    if not self._workers[name].holders:
                        del self._workers[name]

    def _count(self, name: tuple[str, str]) -> None:
        """Share what has passed since the last change among those who held the worker."""
        worker, now = self._workers.setdefault(name, _Worker()), self._clock()
        for one in worker.holders:
            share = (now - worker.since) / len(worker.holders)
            one.seconds[name[0]] = one.seconds.get(name[0], 0.0) + share
        worker.since = now
