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
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from engines.failures import CallDeadline, InfrastructureError, WorkerLost
from engines.workers.calls import build, stop, submit
from engines.workers.cluster import Cluster, raise_if_set
from engines.workers.engine import EngineSpec
from engines.workers.messages import CallId

LOOK = 0.5  # seconds between looks at which workers live


@dataclass(slots=True)
class Assignment:
    """Where a call went, for the log of the task that made it."""

    worker: str = ""  # name, such as rollout-0


class EnginePool:
    """The engines of one role on one pool of workers."""

    def __init__(
        self,
        cluster: Cluster,
        pool: str,
        role: str,
        spec: EngineSpec,
        *,
        deadline: float,
        start_timeout: float,
        cancel: threading.Event | None = None,
    ) -> None:
        self.cluster = cluster
        self.pool = pool
        self.role = role
        self.spec = spec
        self.deadline = deadline  # seconds a call may take
        self.start_timeout = start_timeout  # seconds an engine may take to start
        self.cancel = cancel  # ends every wait when it is set
        self._calls: Counter[str] = Counter()  # calls in flight, by worker name
        self._ready: dict[str, str] = {}  # address -> name of workers whose engine is built
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._freed = threading.Condition()  # guards the calls and those that wait for a slot
        self._waiting: list[tuple[tuple[int, ...], int]] = []  # a heap
        self._tickets = itertools.count()

    def start(self) -> list[str]:
        """Build the engines of all live workers at once; returns the workers' names."""
        workers = self.live()
        with ThreadPoolExecutor(len(workers)) as threads:
            list(threads.map(self.ready, workers.keys(), workers.values()))
        return sorted(workers)

    def live(self) -> dict[str, str]:
        """Name -> address of the pool's live workers; waits for one, then NoWorkers."""
        workers = self.cluster.workers(self.pool)
        return workers or self.cluster.wait(self.pool, 1, cancel=self.cancel)

    def call(
        self, method: str, call_id: CallId, assignment: Assignment | None = None, **arguments: Any
    ) -> Any:
        """Call a method on one of the pool's engines and wait for its result."""
        with self.picked(assignment) as (_, address):
            return self.submit(address, method, call_id, arguments)

    def submit(
        self,
        address: str,
        method: str,
        call_id: CallId,
        arguments: Mapping[str, Any],
        slot: bool = True,
    ) -> Any:
        """Call a method on the engine of a given worker; `slot` as in calls.PendingCall."""
        try:
            return submit(
                self.cluster,
                address,
                self.role,
                method,
                arguments,
                call_id,
                deadline=self.deadline,
                cancel=self.cancel,
                slot=slot,
            )
        except (WorkerLost, CallDeadline):
            self.forget(address)
            raise
        except InfrastructureError:
            self.forget(address)
            # The worker may live on without its engine (vLLM's own process died): a build would
            # find the dead engine, so it is closed.
            with contextlib.suppress(InfrastructureError, TimeoutError):
                stop(self.cluster, address, self.role)
            raise

    def forget(self, address: str) -> None:
        """Take nothing for granted about a worker: its engine is looked at before the next call."""
        self._ready.pop(address, None)

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
    def picked(
        self, assignment: Assignment | None = None, turn: tuple[int, ...] | None = None
    ) -> Iterator[tuple[str, str]]:
        """Name and address of the worker with the fewest calls, its engine ready, for the body.

        With `turn`, a call waits here until a worker has a free slot, so that work goes to whoever
        is done first; of those that wait the lowest turn is next. Without, it queues on its worker.
        """
        name, address = self._pick() if turn is None else self._next_free(turn)
        if assignment is not None:
            assignment.worker = name
        try:
            self.ready(name, address)
            yield name, address
        finally:
            with self._freed:
                self._calls[name] -= 1
                self._freed.notify_all()

    def _pick(self) -> tuple[str, str]:
        workers = self.live()
        with self._freed:
            name = self._least_busy(workers)
            self._calls[name] += 1
        return name, workers[name]

    def _next_free(self, turn: tuple[int, ...]) -> tuple[str, str]:
        slots = self.cluster.config.pools[self.pool].slots
        ticket = (turn, next(self._tickets))
        with self._freed:
            heapq.heappush(self._waiting, ticket)
        try:
            while True:
                raise_if_set(self.cancel)
                with self._freed:
                    if not self._freed.wait_for(lambda: self._waiting[0] == ticket, LOOK):
                        continue
                workers = self.live()
                with self._freed:
                    name = self._least_busy(workers)
                    if self._waiting[0] == ticket and self._calls[name] < slots:
                        self._calls[name] += 1
                        return name, workers[name]
                    self._freed.wait(LOOK)
        finally:
            with self._freed:
                self._waiting.remove(ticket)
                heapq.heapify(self._waiting)
                self._freed.notify_all()

    def _least_busy(self, workers: Mapping[str, str]) -> str:
        return min(sorted(workers), key=lambda worker: self._calls[worker])
