"""Calls that wait for a free slot of a pool's workers; the lowest turn is next."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

# Seconds between looks at the end of the run, and of the first in the queue at who lives.
LOOK = 0.5
STALE = 8  # entries of a worker in the heap, on average, before it is made anew

Turn = tuple[int, ...]
Workers = Mapping[str, str]  # name -> address; of one look at the workers, one object


@dataclass(order=True, slots=True)
class Waiting:
    """A call in the queue."""

    turn: Turn
    ticket: int
    woken: threading.Event = field(default_factory=threading.Event, compare=False)
    worker: str | None = field(default=None, compare=False)  # that it got
    rather: str = field(default="", compare=False)  # the worker that it would have, if it is free


class SlotQueue:
    """Calls in flight by worker, and those that wait. Safe to use from several threads.

    Who frees a slot hands it to the first in the queue, so that a queue of thousands costs next to
    nothing while it waits; only its first looks at which workers live.
    """

    def __init__(
        self,
        slots: int,
        look: Callable[[], Workers],
        known: Callable[[], Workers | None],
        check: Callable[[], None],
    ) -> None:
        """`slots`: calls that a worker takes at once; `look`: the live workers, waiting for one;
        `known`: the same without asking anyone, None where it must be asked; `check`: raises when
        there is nothing to wait for any more.
        """
        self.slots = slots
        self.calls: Counter[str] = Counter()  # in flight, by worker name
        self.waiting: list[Waiting] = []  # a heap
        self._look, self._known, self._check = look, known, check
        self._tickets = itertools.count()
        self._lock = threading.Lock()
        self._workers: Workers = {}  # of which `_by_calls` knows
        # Heap of (calls in flight, worker name); only those that `calls` still says count.
        self._by_calls: list[tuple[int, str]] = []

    def load(self, workers: Workers) -> tuple[int, int]:
        """Calls in flight on these workers, and calls that wait for a slot."""
        with self._lock:
            return sum(self.calls[name] for name in workers), len(self.waiting)

    def least_busy(self, rather: str = "") -> str:
        """Name of the worker with the fewest calls, or of `rather` if it lives; it gets one more."""
        workers = self._look()
        with self._lock:
            name = rather if rather in workers else self._fewest(workers)
            self._count(name, 1)
        return name

    def take(self, turn: Turn, given_up: Callable[[], bool], rather: str = "") -> str | None:
        """Wait for a slot: name of its worker. None once `given_up` says that none is wanted.

        rather: the worker that is taken where it has a free slot; another is not waited for less.
        """
        mine = Waiting(turn, next(self._tickets), rather=rather)
        with self._lock:
            heapq.heappush(self.waiting, mine)
        wanted = False
        try:
            while mine.worker is None and not given_up():
                self._check()
                if self._is_first(mine):
                    self._hand_out(self._look())
                if mine.worker is None:
                    mine.woken.wait(LOOK)
                    mine.woken.clear()
            wanted = not given_up()
            return mine.worker if wanted else None
        finally:
            if not wanted:
                self._withdraw(mine)

    def wake(self) -> None:
        """Have every call in the queue look whether it is given up."""
        with self._lock:
            for one in self.waiting:
                one.woken.set()

    def free(self, name: str) -> None:
        """A call has ended: whoever is first in the queue gets its slot."""
        known = self._known()
        with self._lock:
            self._count(name, -1)
        if known is not None:
            self._hand_out(known)
        else:
            self._wake_first()

    def _is_first(self, mine: Waiting) -> bool:
        with self._lock:
            return bool(self.waiting) and self.waiting[0] is mine

    def _hand_out(self, workers: Workers) -> None:
        with self._lock:
            while self.waiting and workers:
                name = self._fewest(workers)
                if self.calls[name] >= self.slots:
                    return
                first = heapq.heappop(self.waiting)
                if first.rather in workers and self.calls[first.rather] < self.slots:
                    name = first.rather
                first.worker = name
                self._count(name, 1)
                first.woken.set()
        self._wake_first()

    def _withdraw(self, mine: Waiting) -> None:
        with self._lock:
            waits = mine.worker is None
            if waits:
                self.waiting.remove(mine)
                heapq.heapify(self.waiting)
        if mine.worker is not None:
            self.free(mine.worker)
        else:
            self._wake_first()

    def _wake_first(self) -> None:
        with self._lock:
            if self.waiting:
                self.waiting[0].woken.set()

    def _count(self, name: str, more: int) -> None:
        self.calls[name] += more
        if name in self._workers:
            heapq.heappush(self._by_calls, (self.calls[name], name))

    def _fewest(self, workers: Workers) -> str:
        """Name of the worker with the fewest calls, the first by name among several.

        What it costs grows with the logarithm of the workers; once a look, with their number.
        """
        if workers is not self._workers or len(self._by_calls) > STALE * len(workers):
            self._workers = workers
            self._by_calls = [(self.calls[name], name) for name in workers]
            heapq.heapify(self._by_calls)
        while self._by_calls[0][0] != self.calls[self._by_calls[0][1]]:
            heapq.heappop(self._by_calls)
        return self._by_calls[0][1]
