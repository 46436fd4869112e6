"""Whose turn it is on the devices of a pool, and how long calls hold them.

Where roles share devices (cluster.share_devices) whoever has the turn keeps it until another role
wants it; that one waits for the calls under way, the first goes to sleep, and only then does the
other wake. A worker may run several calls at once, of several stages and steps. Its seconds are
shared among them evenly, so that what all calls held never adds up to more than the workers were
there.

This module imports no engine library; it runs in the flow process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from engines.failures import CallCancelled
from engines.workers.engine import Moved

SLICE = 0.2  # seconds between looks at whether the run is cancelled


class DeviceHolder(Protocol):
    """The engines of one role on one pool. Both may be called again after a failure."""

    pool: str
    role: str

    def sleep(self, cancel: threading.Event | None = None) -> Moved:
        """Give the devices' memory back. On return it is free, if only since an engine is dead."""

    def wake(self, cancel: threading.Event | None = None) -> Moved:
        """Take what `sleep` gave back, where an engine stands."""


class DeviceTurns:
    """The turns of every pool; without `shared` nobody waits and nobody sleeps."""

    def __init__(self, shared: bool, tell: Callable[[str], None] = lambda handover: None) -> None:
        """`tell`: of each handover, as in "rollout sleeps, actor wakes"; for logs and tests."""
        self.shared = shared
        self.tell = tell
        self._pools: dict[str, _PoolTurn] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def held(self, holder: DeviceHolder, cancel: threading.Event | None = None) -> Iterator[None]:
        """Have the turn for the body, beside other calls of the same holder.

        Raises CallCancelled, and what a holder's `sleep` or `wake` raises: nobody has the turn then.
        """
        if not self.shared:
            yield
            return
        with self._lock:
            turn = self._pools.setdefault(holder.pool, _PoolTurn(self.tell))
        turn.take(holder, cancel)
        try:
            yield
        finally:
            turn.give_back()

    def holder(self, pool: str) -> str | None:
        """Role that has the devices of a pool."""
        turn = self._pools.get(pool)
        return None if turn is None or turn.holder is None else turn.holder.role

    def metrics(self) -> dict[str, float]:
        """Seconds and bytes of the turns since the last look, by role.

        time/sleep/ROLE, time/wake/ROLE in seconds; bytes/sleep/ROLE, bytes/wake/ROLE of all workers.
        """
        metrics: dict[str, float] = {}
        with self._lock:
            moves = [move for turn in self._pools.values() for move in turn.moves()]
        for what, role, moved in moves:
            for name, value in (("time", moved.seconds), ("bytes", float(moved.nbytes))):
                key = f"{name}/{what}/{role}"
                metrics[key] = metrics.get(key, 0.0) + value
        return metrics


Move = tuple[Literal["sleep", "wake"], str, Moved]


class _PoolTurn:
    """The turn of one pool."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.holder: DeviceHolder | None = None
        self._tell = tell
        self._using = 0  # calls of the holder that are under way
        self._changing = False
        self._changed = threading.Condition()
        self._moves: list[Move] = []

    def take(self, holder: DeviceHolder, cancel: threading.Event | None) -> None:
        """Return once `holder` has the turn."""
        with self._changed:
            while self._changing or (self._using and self.holder is not holder):
                if cancel is not None and cancel.is_set():
                    raise CallCancelled(f"{holder.role} waited for the devices of {holder.pool}")
                self._changed.wait(SLICE)
            if self.holder is holder:
                self._using += 1
                return
            self._changing = True
        try:
            self._hand_over(holder, cancel)
        finally:
            with self._changed:
                self._changing = False
                self._using = int(self.holder is holder)
                self._changed.notify_all()

    def _hand_over(self, holder: DeviceHolder, cancel: threading.Event | None) -> None:
        before = self.holder
        if before is not None:
            self._moved("sleep", before.role, before.sleep(cancel))
            self.holder = None  # until the other one has woken
        self._moved("wake", holder.role, holder.wake(cancel))
        self.holder = holder
        slept = "" if before is None else f"{before.role} sleeps, "
        self._tell(f"{slept}{holder.role} wakes")

    def _moved(self, what: Literal["sleep", "wake"], role: str, moved: Moved) -> None:
        with self._changed:
            self._moves.append((what, role, moved))

    def give_back(self) -> None:
        """A call of the holder has ended."""
        with self._changed:
            self._using -= 1
            self._changed.notify_all()

    def moves(self) -> list[Move]:
        """What went to sleep and woke since the last look."""
        with self._changed:
            moves, self._moves = self._moves, []
            return moves


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
        for holder in worker.holders:
            share = (now - worker.since) / len(worker.holders)
            holder.seconds[name[0]] = holder.seconds.get(name[0], 0.0) + share
        worker.since = now
