"""A pool of interchangeable engines: each call goes to the live worker with the fewest calls.

A worker may die, come back under another address, or join later: its engine is built when a call
first reaches it, so nothing is told to anyone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Concatenate, Generic, ParamSpec, TypeVar

from engines.failures import CallDeadline, InfrastructureError, WorkerLost
from engines.workers.broadcast import submit_to_all
from engines.workers.calls import build, stop, submit
from engines.workers.cluster import Cluster, raise_if_set
from engines.workers.device_time import DeviceTime, HeldSeconds
from engines.workers.engine import Call, Engine, EngineSpec
from engines.workers.membership import SCAN_AGE
from engines.workers.messages import CallId
from engines.workers.slot_queue import SlotQueue, Turn

E = TypeVar("E", bound=Engine, covariant=True)  # the contract of a pool's engines
P = ParamSpec("P")  # what a method of theirs takes
R = TypeVar("R")  # what it returns


@dataclass(slots=True)
class Assignment:
    """Where a call went, for the log of the task that made it."""

    worker: str = (
        ""  # name, such as rollout-0; before the call, of the one that it would rather have
    )
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
        slots = at_once or cluster.config.pools[pool].slots
        self._slots = SlotQueue(slots, self.live, self._known, self._check)

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

    def _known(self) -> Mapping[str, str] | None:
        return self.cluster.known_workers(self.pool)

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
        rather = "" if assignment is None else assignment.worker
        with self._calling(self._slots.least_busy(rather), assignment) as (_, address):
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
        with self._calling(name, assignment) as found:
            yield found

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
