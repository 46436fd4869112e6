"""A pool of interchangeable engines: each call goes to the live worker with the fewest calls.

A worker may die, come back under another address, or join later: its engine is built when a call
first reaches it, so nothing is told to anyone.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Concatenate, Generic, ParamSpec, TypeVar

from engines.failures import CallDeadline, InfrastructureError, WorkerLost
from engines.workers.calls import build, stop, submit, submit_to_all
from engines.workers.cluster import SCAN_AGE, Cluster, raise_if_set
from engines.workers.devices import DeviceTime, HeldSeconds
from engines.workers.engine import Call, CallId, Engine, EngineSpec

E = TypeVar("E", bound=Engine, covariant=True)  # the contract of a pool's engines
P = ParamSpec("P")  # what a method of theirs takes
R = TypeVar("R")  # what it returns
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
    preferred: str = field(
        default="", compare=False
    )  # the worker that it would have, if it is free


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

    def least_busy(self, preferred: str = "") -> str:
        """Name of the worker with the fewest calls, or `preferred` if it lives; it gets one more."""
        workers = self._look()
        with self._lock:
            name = preferred if preferred in workers else self._fewest(workers)
            self._count(name, 1)
        return name

    def take(self, turn: Turn, given_up: Callable[[], bool], preferred: str = "") -> str | None:
        """Wait for a slot: name of its worker. None once `given_up` says that none is wanted.

        preferred: the worker that is taken where it has a free slot; another is not waited for less.
        """
        call = Waiting(turn, next(self._tickets), preferred=preferred)
        with self._lock:
            heapq.heappush(self.waiting, call)
        takes = False
        try:
            while call.worker is None and not given_up():
                self._check()
                with self._lock:
                    is_first = bool(self.waiting) and self.waiting[0] is call
                if is_first:
                    self._hand_out(self._look())
                if call.worker is None:
                    call.woken.wait(LOOK)
                    call.woken.clear()
            takes = not given_up()
            return call.worker if takes else None
        finally:
            if not takes:
                self._withdraw(call)

    def wake(self) -> None:
        """Have every call in the queue look whether it is given up."""
        with self._lock:
            for call in self.waiting:
                call.woken.set()

    def free(self, name: str) -> None:
        """A call has ended: whoever is first in the queue gets its slot."""
        workers = self._known()
        with self._lock:
            self._count(name, -1)
        if workers is not None:
            self._hand_out(workers)
        else:
            self._wake_first()

    def _hand_out(self, workers: Workers) -> None:
        with self._lock:
            while self.waiting and workers:
                name = self._fewest(workers)
                if self.calls[name] >= self.slots:
                    return
                first = heapq.heappop(self.waiting)
                if first.preferred in workers and self.calls[first.preferred] < self.slots:
                    name = first.preferred
                first.worker = name
                self._count(name, 1)
                first.woken.set()
        self._wake_first()

    def _withdraw(self, call: Waiting) -> None:
        with self._lock:
            waits = call.worker is None
            if waits:
                self.waiting.remove(call)
                heapq.heapify(self.waiting)
        if call.worker is not None:
            self.free(call.worker)
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


@dataclass(slots=True)
class Assignment:
    """Where a call went, for the log of the task that made it."""

    worker: str = ""  # name, such as rollout-0; before the call, of the one that it prefers
    time: DeviceTime = field(default_factory=DeviceTime)  # that shares the workers' seconds
    held: HeldSeconds = field(default_factory=HeldSeconds)  # what the calls had of them


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLoad:
    """How busy the engines of one role are."""

    slots: int  # calls that its live workers take at once
    calls: int  # in flight
    waiting: int  # for a slot


class EnginePool(Generic[E]):
    """The engines of one role on one pool of workers, which keep the contract E."""

    def __init__(
        self,
        cluster: Cluster,
        pool: str,
        role: str,
        spec: EngineSpec[E],
        *,
        deadline: float,
        start_timeout: float,
        cancel: threading.Event | None = None,
        at_once: int | None = None,
    ) -> None:
        """`at_once`: calls that an engine takes, past its worker's slots; None: as many as slots."""
        self.cluster = cluster
        self.pool = pool
        self.role = role
        self.spec = spec
        self.deadline = deadline  # seconds a call may take
        self.start_timeout = start_timeout  # seconds an engine may take to start
        self.cancel = cancel  # ends every wait when it is set
        self._ready: dict[str, str] = {}  # address -> name of workers whose engine is built
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._calls_aside = at_once is not None
        if pool not in cluster.config.pools:
            raise LookupError(
                f"The engines of role {role!r} live on the pool {pool!r}, which is not started: "
                "used_pools of the run's settings lacks it."
            )
        slots = at_once or cluster.config.pools[pool].slots
        known = partial(cluster.known_workers, pool)
        self._slots = SlotQueue(slots, self.live, known, self._check)

    def load(self) -> PoolLoad:
        """How busy it is now; ClusterLost where the cluster has ended."""
        workers = self.cluster.workers(self.pool, max_age=SCAN_AGE)
        calls, waiting = self._slots.load(workers)
        return PoolLoad(slots=self._slots.slots * len(workers), calls=calls, waiting=waiting)

    def start(self) -> list[str]:
        """Build the engines of all live workers at once; returns the workers' names."""
        workers = self.live()
        with ThreadPoolExecutor(len(workers)) as threads:
            list(threads.map(self.ready, workers.keys(), workers.values()))
        return sorted(workers)

    def live(self) -> Mapping[str, str]:
        """Name -> address of the pool's live workers; waits for one, then NoWorkers."""
        workers = self.cluster.workers(self.pool, max_age=SCAN_AGE)
        return workers or self.cluster.wait(self.pool, 1, cancel=self.cancel)

    def _check(self) -> None:
        raise_if_set(self.cancel)
        self.cluster.check()

    def call(
        self,
        method: Callable[Concatenate[E, P], R],
        call_id: CallId,
        assignment: Assignment | None = None,
        /,
        *nothing: P.args,
        **arguments: P.kwargs,
    ) -> R:
        """Call a method of the contract on one of the pool's engines and wait for its result.

        Its arguments are given by name.
        """
        preferred = "" if assignment is None else assignment.worker
        with self._calling(self._slots.least_busy(preferred), assignment) as (_, address):
            call = Call.of(self.role, method, call_id, *nothing, **arguments)
            return self.submit(address, call)

    def submit(self, address: str, call: Call[R], slot: bool = True) -> R:
        """Make a call on the engine of a given worker; `slot` as in calls.PendingCall."""
        try:
            return submit(
                self.cluster,
                address,
                call,
                deadline=self.deadline,
                cancel=self.cancel,
                slot=slot,
                aside=slot and self._calls_aside,
            )
        except InfrastructureError as failure:
            self._failed(address, failure)
            raise

    def submit_to_all(
        self, workers: Mapping[str, str], call: Call[R]
    ) -> dict[str, R | InfrastructureError]:
        """Make a call on the engines of given workers (name -> address), past their slots.

        Returns by name what each returned, or how its machinery failed.
        """
        outcomes = submit_to_all(
            self.cluster, self.pool, workers, call, deadline=self.deadline, cancel=self.cancel
        )
        for name, outcome in outcomes.items():
            if isinstance(outcome, InfrastructureError):
                self._failed(workers[name], outcome)
        return outcomes

    def _failed(self, address: str, failure: InfrastructureError) -> None:
        self.forget(address)
        if isinstance(failure, WorkerLost | CallDeadline):
            return
        # The worker may live on without its engine (vLLM's own process died): a build would find the
        # dead engine, so it is closed.
        with contextlib.suppress(InfrastructureError, TimeoutError):
            stop(self.cluster, address, self.role)

    def forget(self, address: str) -> None:
        """Take nothing for granted about a worker: it is looked at before the next call."""
        self._ready.pop(address, None)
        self.cluster.table.outdate()

    def ready(self, name: str, address: str) -> None:
        """Build the worker's engine unless it is there."""
        with self._lock:
            lock = self._locks.setdefault(address, threading.Lock())
        with lock:
            if address not in self._ready:
                build(
                    self.cluster,
                    address,
                    self.role,
                    self.spec,
                    deadline=self.start_timeout,
                    cancel=self.cancel,
                )
                self._ready[address] = name

    @contextlib.contextmanager
    def next_free(
        self, assignment: Assignment, turn: Turn, given_up: Callable[[], bool]
    ) -> Iterator[tuple[str, str] | None]:
        """Name and address of a worker with a free slot, its engine ready, for the body.

        A call waits here and not on a worker, so that work goes to whoever is done first; of those
        that wait the lowest turn is next. None once it is `given_up` (see SlotQueue.wake).
        """
        name = self._slots.take(turn, given_up, assignment.worker)
        if name is None:
            yield None
            return
        with self._calling(name, assignment) as place:
            yield place

    @contextlib.contextmanager
    def _calling(
        self, name: str, assignment: Assignment | None = None
    ) -> Iterator[tuple[str, str]]:
        """Hold a slot of a worker, and have its engine ready, for the body."""
        assignment = Assignment() if assignment is None else assignment
        assignment.worker = name
        try:
            with assignment.time.held(self.pool, [name], assignment.held):
                address = self.live().get(name)
                if address is None:
                    raise WorkerLost(name, "it left before the call began")
                self.ready(name, address)
                yield name, address
        finally:
            self._slots.free(name)
