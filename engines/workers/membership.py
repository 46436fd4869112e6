"""Who belongs to a cluster: a table of its live workers, and the questions that fill it.

The functions run on the scheduler and on nannies, by `client.run_on_scheduler` and `client.run`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from distributed import Nanny, Scheduler, SchedulerPlugin

from engines.processes.process_tree import kill_tree

SCAN_AGE = 10.0  # seconds for which a look at the workers is good enough while nothing is heard
SILENT = 20.0  # seconds; workers are heard of several times as often, by their heartbeats
JOINING = 3.0  # seconds that a worker may take from its first word to its first call
JOINING_AGE = 0.2  # seconds for which a look is good enough meanwhile


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A live worker of a pool."""

    name: str  # stable over restarts, e.g. "rollout-0"
    address: str  # tcp://HOST:PORT; another one after a restart
    pool: str

    @property
    def host(self) -> str:
        """Host of the address."""
        return self.address.rpartition("://")[2].rpartition(":")[0].strip("[]")


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedWorker:
    """A worker as its scheduler sees it."""

    name: str
    address: str
    pools: tuple[str, ...]  # names of its resources
    ready: bool  # takes calls; False while it leaves
    processing: int  # calls handed to it, running or waiting for a slot


class TellsOfWorkers(SchedulerPlugin):
    """On the scheduler: tells the flow of every worker that joins or leaves.

    Dask's own events of that are on a topic with others, of which one, that a client has gone, it
    cannot deliver to that client, and logs so.
    """

    name = "refrain-workers"
    topic = "refrain-workers"
    idempotent = True  # a second flow that joins the cluster hears the first one's

    async def start(self, scheduler: Scheduler) -> None:
        """Called by Dask, perhaps when there are workers already."""
        self._workers = dict(scheduler.workers)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Called by Dask; the worker may not take calls yet."""
        self._workers[worker] = scheduler.workers[worker]
        self._tell(scheduler, "add-worker", worker)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: object) -> None:
        """Called by Dask, which has forgotten the worker by then."""
        state = self._workers.pop(worker, None)
        silence = 0.0 if state is None else max(0.0, time.time() - state.last_seen)
        self._tell(scheduler, "remove-worker", worker, silence=silence)

    def _tell(self, scheduler: Scheduler, action: str, worker: str, **more: float) -> None:
        if not all(comm.closed() for comm in scheduler.client_comms.values()):
            scheduler.log_event(self.topic, {"action": action, "worker": worker, **more})


def why_gone(silence: float) -> str:
    """What became of a worker, by the seconds in which nothing was heard of it before.

    The kernel of a process that ends closes its connection at once; nobody does on a host that is
    cut off, and the scheduler gives it up half a minute later (`distributed.comm.timeouts.tcp`).
    """
    if silence < SILENT:
        return "its process ended (killed, out of memory, or crashed)"
    return (
        f"nothing was heard of it for {silence:.0f} s: its host or the link to it is down, or its "
        "process hung"
    )


def list_workers(dask_scheduler: Scheduler) -> list[ListedWorker]:
    """On the scheduler: every worker."""
    return [
        ListedWorker(
            name=str(worker.name),
            address=worker.address,
            pools=tuple(worker.resources),
            ready=worker.status.name == "running",
            processing=len(worker.processing),
        )
        for worker in dask_scheduler.workers.values()
    ]


def allowed_failures(dask_scheduler: Scheduler) -> int:
    """On the scheduler: how often it re-runs the calls of dead workers."""
    return int(dask_scheduler.allowed_failures)


def kill_worker(dask_worker: Nanny) -> list[int]:
    """On a nanny: kill its worker with everything below; the nanny then starts another."""
    pid = dask_worker.pid
    return kill_tree(pid) if pid else []


def by_name(member: Member) -> list[tuple[int, str]]:
    """Sort key that puts worker-2 before worker-10."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", member.name)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A look at the workers."""

    when: float  # monotonic clock
    changes: int  # heard of before it
    members: Mapping[str, Member]  # by name, in natural order
    pools: Mapping[str, Mapping[str, Member]] = field(default_factory=dict)  # the same by pool
    addresses: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict
    )  # pool -> name -> address
    at: Mapping[str, str] = field(default_factory=dict)  # address -> pool


class WorkerTable:
    """The live workers as they were last seen. The scheduler's word of a change makes it old.

    Looking costs the scheduler and us time in proportion to the workers; so calls read the table,
    and a look is taken only where it is old. Safe to use from several threads.
    """

    def __init__(self, pools: Collection[str], ask: Callable[[], list[ListedWorker]]) -> None:
        """`pools`: the names of ours; `ask`: lists all workers of the scheduler."""
        self._pools = tuple(pools)
        self._ask = ask
        self._looking = threading.Lock()
        self.changes = 0  # heard of so far
        self._joining_until = -JOINING
        self._names: dict[str, str] = {}  # of every address ever seen
        self._causes: dict[str, str] = {}  # address -> what became of the worker
        self._last_loss: dict[str, str] = {}  # by pool
        self._seen = Seen(when=-SCAN_AGE, changes=-1, members={})

    def heard(self, event: tuple[float, Mapping[str, object]]) -> None:
        """Take the scheduler's word that something happened; what concerns no worker is nothing."""
        match event[1].get("action"):
            case "add-worker":  # it is not ready yet, and nobody says when it is
                self._joining_until = time.monotonic() + JOINING
                self.outdate()
            case "remove-worker":
                address, silence = event[1].get("worker"), event[1].get("silence")
                if isinstance(address, str) and isinstance(silence, int | float):
                    self._lost(address, float(silence))
                self.outdate()

    def _lost(self, address: str, silence: float) -> None:
        self._causes[address] = cause = why_gone(silence)
        if (pool := self._seen.at.get(address)) is not None:
            self._last_loss[pool] = f"{self.name_of(address)}: {cause}"

    def cause_of(self, address: str) -> str | None:
        """What became of a worker; None where the scheduler has not said that it is gone."""
        return self._causes.get(address)

    def last_loss(self, pool: str) -> str:
        """Name of the pool's worker that was lost last, and what became of it; empty: none was."""
        return self._last_loss.get(pool, "")

    def outdate(self) -> None:
        """Have the next reader look anew."""
        self.changes += 1

    def known(self, max_age: float = SCAN_AGE) -> Seen | None:
        """The last look, if it is good enough; asks nobody."""
        seen, now = self._seen, time.monotonic()
        age = JOINING_AGE if now < self._joining_until else SCAN_AGE
        good = seen.changes == self.changes and now - seen.when <= min(age, max_age)
        return seen if good else None

    def look(self, max_age: float = SCAN_AGE) -> Seen:
        """The last look, or a new one where that is older than `max_age` seconds, or outdated."""
        if (seen := self.known(max_age)) is not None:
            return seen
        with self._looking:
            if (seen := self.known(max_age)) is None:
                seen = self._seen = self._new()
        return seen

    def _new(self) -> Seen:
        changes, found = self.changes, []
        for one in self._ask():
            pools = [pool for pool in self._pools if pool in one.pools]
            if pools and one.ready:
                found.append(Member(name=one.name, address=one.address, pool=pools[0]))
            self._names[one.address] = one.name
        members = {member.name: member for member in sorted(found, key=by_name)}
        by_pool: dict[str, dict[str, Member]] = {pool: {} for pool in self._pools}
        addresses: dict[str, dict[str, str]] = {pool: {} for pool in self._pools}
        for name, member in members.items():
            by_pool[member.pool][name] = member
            addresses[member.pool][name] = member.address
        return Seen(
            when=time.monotonic(),
            changes=changes,
            members=members,
            pools=by_pool,
            addresses=addresses,
            at={member.address: member.pool for member in found},
        )

    def name_of(self, address: str) -> str:
        """Name of the worker that has or had an address."""
        return self._names.get(address, address)
