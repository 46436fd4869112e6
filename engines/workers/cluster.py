"""A running Dask cluster: its workers in a table, the waits for them; kill and restart them, end it.

How a cluster is started or joined is in engines/clusters/, calls on engines in
engines/workers/calls.py, gangs in engines/workers/gang.py. This module imports no engine library;
it runs in the flow process, and some of its functions on the scheduler and on nannies, by
`client.run_on_scheduler` and `client.run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from distributed import Client, Nanny, NannyPlugin, Scheduler, SchedulerPlugin

from configs.cluster import ClusterConfig
from engines.failures import CallCancelled, ClusterLost, NoWorkers
from engines.processes.dask_settings import Certificates
from engines.processes.node import NodeProcess
from engines.processes.process_tree import kill_tree
from engines.workers.devices import DeviceTurns
from engines.workers.engine import CallResult
from engines.workers.transport import CallWatch, PushedResults, Sender
from engines.workers.worker_metrics import Spent
from storage.objects.usage import Usage

SCAN_AGE = 10.0  # seconds for which a look at the workers is good enough while nothing is heard
SILENT = 20.0  # seconds; workers are heard of several times as often, by their heartbeats
JOINING = 3.0  # seconds that a worker may take from its first word to its first call
JOINING_AGE = 0.2  # seconds for which a look is good enough meanwhile
EVERY = 30.0  # seconds between two lines, and before the first: workers take these to start
GAP = 30.0  # seconds without anybody who waits, after which another outage begins
# What a worker says that has lost its scheduler, or that the scheduler has given up meanwhile.
CUT_OFF = ("worker-handle-scheduler-connection-broken", "worker-heartbeat-missing")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """A wait for workers, as it is told."""

    pool: str
    there: int  # live workers of the pool
    needed: int
    since: float  # when the first who waits began to, in seconds since 1970
    until: float  # when the wait that is told gives up, likewise
    limit: float  # seconds that a wait takes at most
    cause: str  # what became of the pool's last worker that was lost; empty: none was


Say: TypeAlias = Callable[[Wait], object]


@dataclass(slots=True)
class _Outage:
    since: float
    waited: float  # when somebody waited last
    reported: float


class Outages:
    """The waits of a cluster's pools, told every half minute, once for all who wait.

    Safe to use from several threads, which wait for one pool.
    """

    def __init__(self) -> None:
        self.say: Say = lambda wait: None
        self._pools: dict[str, _Outage] = {}
        self._lock = threading.Lock()

    def waiting(
        self, pool: str, there: int, needed: int, remaining: float, limit: float, cause: str
    ) -> None:
        """Somebody still waits for a pool, for `remaining` seconds at most; tells it where due."""
        now = time.time()
        with self._lock:
            outage = self._pools.get(pool)
            if outage is None or now - outage.waited > GAP:
                outage = self._pools[pool] = _Outage(since=now, waited=now, reported=now)
            outage.waited = now
            if now - outage.reported < EVERY:
                return
            outage.reported = now
        self.say(
            Wait(
                pool=pool, there=there, needed=needed, since=outage.since, until=now + remaining,
                limit=limit, cause=cause,
            )
        )  # fmt: skip

    def over(self, pool: str) -> None:
        """A pool has the workers that somebody waited for."""
        with self._lock:
            self._pools.pop(pool, None)


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
class View:
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
        self._view = View(when=-SCAN_AGE, changes=-1, members={})

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
        if (pool := self._view.at.get(address)) is not None:
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

    def known(self, max_age: float = SCAN_AGE) -> View | None:
        """The last look, if it is good enough; asks nobody."""
        view, now = self._view, time.monotonic()
        age = JOINING_AGE if now < self._joining_until else SCAN_AGE
        good = view.changes == self.changes and now - view.when <= min(age, max_age)
        return view if good else None

    def look(self, max_age: float = SCAN_AGE) -> View:
        """The last look, or a new one where that is older than `max_age` seconds, or outdated."""
        if (view := self.known(max_age)) is not None:
            return view
        with self._looking:
            if (view := self.known(max_age)) is None:
                view = self._view = self._new()
        return view

    def _new(self) -> View:
        changes, live = self.changes, []
        for worker in self._ask():
            pools = [pool for pool in self._pools if pool in worker.pools]
            if pools and worker.ready:
                live.append(Member(name=worker.name, address=worker.address, pool=pools[0]))
            self._names[worker.address] = worker.name
        members = {member.name: member for member in sorted(live, key=by_name)}
        by_pool: dict[str, dict[str, Member]] = {pool: {} for pool in self._pools}
        addresses: dict[str, dict[str, str]] = {pool: {} for pool in self._pools}
        for name, member in members.items():
            by_pool[member.pool][name] = member
            addresses[member.pool][name] = member.address
        return View(
            when=time.monotonic(),
            changes=changes,
            members=members,
            pools=by_pool,
            addresses=addresses,
            at={member.address: member.pool for member in live},
        )

    def name_of(self, address: str) -> str:
        """Name of the worker that has or had an address."""
        return self._names.get(address, address)


ASK_TIMEOUT = 30.0  # seconds that the scheduler or a nanny may take to answer
KILL_TIMEOUT = 5.0  # seconds until the scheduler must have noticed that a worker was killed
CLOSE_TIMEOUT = 1.0  # seconds for the client's farewell
WORD = 1.0  # seconds in which the scheduler's word of a lost worker follows its loss
GONE = "its process ended or its host cannot be reached"
AFTERMATH = 2.0  # seconds in which the end of a process becomes known once its sockets have closed

Worker = TypeVar("Worker", Member, str)


class RemoteWorkers(ABC):
    """Workers that run elsewhere on our behalf: Slurm jobs, pods, processes behind SSH."""

    def leaving(self) -> frozenset[str]:
        """Names of workers that will end soon and are being replaced."""
        return frozenset()

    def failure(self) -> str | None:
        """Why no more workers will come; None while all is well, or some may still come."""
        return None

    def certificate_files(self) -> Certificates | None:
        """The cluster's certificates as files, where they were put for the workers."""
        return None

    def watch(self, cluster: Cluster) -> None:  # noqa: B027 - others may see to it
        """Begin to replace workers that end."""

    @abstractmethod
    def close(self) -> None:
        """End every worker."""


class Cluster:
    """A running cluster; a context manager that ends it. Safe to use from several threads."""

    def __init__(
        self,
        config: ClusterConfig,
        client: Client,
        node: NodeProcess | None = None,
        logs: Path | None = None,
        remote: RemoteWorkers | None = None,
    ) -> None:
        """`node`: the process of the scheduler that we started, `remote`: its workers elsewhere;
        `logs`: directory of the workers' log files, one for each name.
        """
        self.config = config
        self.client = client
        self.logs = logs
        self._node = node
        self._remote = remote
        self.table = WorkerTable(config.pools, self._list)
        self.outages = Outages()
        self.watch = CallWatch(self._look)
        self.sender = Sender(client)
        self.pushed = PushedResults(client)
        client.subscribe_topic(TellsOfWorkers.topic, self._heard)
        self.usage: dict[str, Usage] = {}  # of the store by worker process, as its last call told
        self.spent: dict[tuple[str, str], Spent] = {}  # by pool and worker process, likewise
        self.devices = DeviceTurns(config.share_devices)
        self._turns = {pool: threading.Lock() for pool in config.pools}
        self._closed = False
        self._closing = threading.Lock()
        self._lost: str | None = None  # why the scheduler has been given up

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def certificate_files(self) -> Certificates | None:
        """The certificates as files, where we made them: for a look from another process."""
        if self._remote is not None and (files := self._remote.certificate_files()) is not None:
            return files
        return None if self._node is None else self._node.certificate_files()

    @property
    def scheduler(self) -> str:
        """Address of the Dask scheduler."""
        return str(self.ask(self.client.scheduler.identity)["address"])

    # -- workers ---------------------------------------------------------------------------------

    def members(self, pool: str | None = None, max_age: float = 0.0) -> Mapping[str, Member]:
        """Live workers by name, in natural order; of one pool or of all.

        `max_age`: seconds for which an earlier look will do.
        """
        if pool is None:
            return self.table.look(max_age).members
        self._check_pool(pool)
        return self.table.look(max_age).pools[pool]

    def _heard(self, event: tuple[float, Mapping[str, object]]) -> None:
        self.table.heard(event)
        if event[1].get("action") == "remove-worker":  # it takes its calls with it
            self.watch.look_now()

    def _list(self) -> list[ListedWorker]:
        try:
            listed: list[ListedWorker] = self.ask(
                self.client.run_on_scheduler, list_workers, timeout=ASK_TIMEOUT
            )
        except TimeoutError:
            self._lost = (
                f"the Dask scheduler has not answered for {ASK_TIMEOUT:g} s. "
                "The run can be resumed."
            )
            raise ClusterLost(self._lost) from None
        return listed

    def _look(self) -> Mapping[str, str]:
        """Pool of each live worker by its address; ClusterLost once the cluster has ended."""
        self.check()
        return self.table.look().at

    def workers(self, pool: str, max_age: float = 0.0) -> Mapping[str, str]:
        """Addresses of a pool's live workers by name. Ask anew on every attempt: they change.

        Workers that are about to leave are among them only as long as others are missing.
        `max_age` as in `members`. Of one look at the workers it is one object, while none leaves.
        """
        self._check_pool(pool)
        return self._staying(pool, self.table.look(max_age).addresses[pool])

    def known_workers(self, pool: str) -> Mapping[str, str] | None:
        """The same as far as it is known; None where the workers must be looked at anew."""
        view = self.table.known()
        return None if view is None else self._staying(pool, view.addresses[pool])

    def staying(self, pool: str, max_age: float = 0.0) -> Mapping[str, Member]:
        """The pool's workers that get calls: those that stay, and until they are enough, others."""
        return self._staying(pool, self.members(pool, max_age))

    def _staying(self, pool: str, workers: Mapping[str, Worker]) -> Mapping[str, Worker]:
        leaving = self._remote.leaving() if self._remote is not None else frozenset()
        if workers.keys().isdisjoint(leaving):
            return workers
        spare = self.config.pools[pool].workers - len(workers.keys() - leaving)
        spares = [name for name in workers if name in leaving][: max(spare, 0)]
        return {
            name: worker
            for name, worker in workers.items()
            if name not in leaving or name in spares
        }

    def _check_pool(self, pool: str) -> None:
        if pool not in self.config.pools:
            raise ValueError(f"{pool!r} is no pool. The pools are {sorted(self.config.pools)}.")

    def count(self, pool: str, result: CallResult) -> None:
        """Take what a pool's worker process says with a call: what it has used since it began."""
        process, usage, spent = result.process, result.usage, result.spent
        if usage.requests >= self.usage.get(process, usage).requests:  # calls end in any order
            self.usage[process] = usage
        if spent.cpu_seconds >= self.spent.get((pool, process), spent).cpu_seconds:
            self.spent[pool, process] = spent

    def log_hint(self, name: str) -> str:
        """Where a worker's output is, and its last line; empty where we do not know."""
        if self.logs is None:
            return ""
        path = self.logs / f"{name}.log"
        try:
            lines = path.read_text(errors="replace")[-4096:].split("\n")
        except OSError:
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; see {path}" + (f", which ends: {last[:300]}" if last else "")

    def why_gone(self, address: str) -> str:
        """What became of a lost worker; the scheduler's word of it may come a moment later."""
        until = time.monotonic() + WORD
        while (cause := self.table.cause_of(address)) is None and time.monotonic() < until:
            time.sleep(0.02)
        return cause or GONE

    def pool_of(self, address: str, max_age: float = SCAN_AGE) -> str | None:
        """Pool of a live worker; None when there is none at this address (any more)."""
        pool = self.table.look(max_age).at.get(address)
        return pool or self.table.look(0.0).at.get(address)

    def wait(
        self,
        pool: str,
        n: int = 1,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
    ) -> Mapping[str, str]:
        """Wait until a pool has `n` live workers; NoWorkers after `timeout` seconds.

        The time-out is cluster.no_workers_timeout unless given.
        """
        limit = self.config.no_workers_timeout if timeout is None else timeout
        began = time.monotonic()
        while len(workers := self.workers(pool)) < n:
            waited = time.monotonic() - began
            if waited >= limit:
                raise NoWorkers(pool, waited, len(workers), n)
            raise_if_set(cancel)
            cause = self.table.last_loss(pool)
            self.outages.waiting(pool, len(workers), n, limit - waited, limit, cause)
            time.sleep(0.05 if waited < 2 else 0.25)
        self.outages.over(pool)
        return workers

    def kill(self, addresses: Iterable[str]) -> list[str]:
        """Kill workers with their whole process trees; their nannies start new ones.

        By address, so that a worker that has been restarted meanwhile is left alone. Returns the
        addresses that are gone; does not wait for the new workers.
        """
        targets = set(addresses) & {member.address for member in self.members().values()}
        if not targets:
            return []
        with contextlib.suppress(TimeoutError):
            self.ask(
                self.client.run, kill_worker, workers=list(targets), nanny=True, on_error="ignore"
            )
        until = time.monotonic() + KILL_TIMEOUT
        while True:
            alive = targets & {member.address for member in self.members().values()}
            if not alive or time.monotonic() >= until:
                return sorted(targets - alive)
            time.sleep(0.01)

    @contextlib.contextmanager
    def turn(self, pool: str, cancel: threading.Event | None = None) -> Iterator[None]:
        """Hold a pool's turn: gangs of colocated roles run one after the other."""
        lock = self._turns[pool]
        while not lock.acquire(timeout=0.2):
            raise_if_set(cancel)
        try:
            yield
        finally:
            lock.release()

    # -- the cluster itself ----------------------------------------------------------------------

    def ask(
        self, question: Callable[..., Any], *args: Any, timeout: float = ASK_TIMEOUT, **kwargs: Any
    ) -> Any:
        """Run a client method such as `client.run` with a bound on the answer.

        ClusterLost when the scheduler is gone; TimeoutError when it, or a worker, does not answer.
        """
        self.check()

        async def bounded() -> Any:
            return await asyncio.wait_for(question(*args, **kwargs), timeout)

        try:
            # Bounded from outside too: the loop may have been stopped by `close` in another thread.
            return self.client.sync(bounded, callback_timeout=timeout + CLOSE_TIMEOUT)
        except TimeoutError:
            self.check()
            raise TimeoutError(f"no answer from the cluster within {timeout:g} s") from None
        except OSError as error:
            self.check()
            if self._answers():  # then it is a worker that does not
                raise TimeoutError(f"a worker cannot be reached: {error}") from error
            raise self.why_lost(f"the Dask scheduler cannot be reached: {error}") from error

    def ask_each(
        self, question: Callable[..., object], addresses: Iterable[str], patience: float
    ) -> dict[str, Any]:
        """What workers answer, by address; one that is busy or has gone holds up none of the others.

        Without those that have not answered after `patience` seconds. Raises as `ask`.
        """

        async def answer_of(address: str) -> dict[str, Any]:
            answer = self.client.run(question, workers=[address], on_error="ignore")
            try:
                return dict(await asyncio.wait_for(answer, patience))
            except (TimeoutError, OSError, ValueError):
                return {}

        async def answers() -> dict[str, Any]:
            each = await asyncio.gather(*map(answer_of, addresses))
            return {address: value for answer in each for address, value in answer.items()}

        by_address: dict[str, Any] = self.ask(answers)
        return by_address

    def _answers(self) -> bool:
        """Whether the scheduler answers."""
        try:
            self.client.sync(self.client.scheduler.identity, callback_timeout=KILL_TIMEOUT)
        except (TimeoutError, OSError):
            return False
        return True

    def check(self) -> None:
        """Raise ClusterLost when the cluster is closed or its scheduler is known to be gone."""
        if self._closed:
            raise ClusterLost("the cluster has been closed")
        if self._lost is not None:
            raise ClusterLost(self._lost)
        if self._node is not None and (status := self._node.exit_status()) is not None:
            raise ClusterLost(
                f"the process of the Dask scheduler ended (exit status {status}), and all workers "
                "with it. The run can be resumed."
            )
        if self._remote is not None and (why := self._remote.failure()) is not None:
            raise ClusterLost(why)
        if self.client.status not in ("running", "connecting"):
            raise ClusterLost(
                f"the connection to the Dask scheduler is {self.client.status}. "
                "The run can be resumed."
            )

    def why_lost(self, symptom: str) -> ClusterLost:
        """What ended the cluster, or what was `symptom` of it if nothing says so within seconds.

        The sockets of a process that dies close a moment before the kernel tells its end.
        """
        until = time.monotonic() + AFTERMATH
        while time.monotonic() < until:
            try:
                self.check()
            except ClusterLost as error:
                return error
            time.sleep(0.05)
        return ClusterLost(f"{symptom}. The run can be resumed.")

    def close(self) -> None:
        """End it all. A local cluster's processes, and what they started, are gone on return.

        A cluster that was joined goes on without us.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            with _quiet_client(), contextlib.ExitStack() as stack:
                stack.callback(self._close_client)
                if self._node is not None:
                    stack.callback(self._node.end)
                if self._remote is not None:
                    stack.callback(self._remote.close)
                stack.callback(self.watch.close)

    def _close_client(self) -> None:
        if self._node is None:  # a scheduler that goes on without us
            with contextlib.suppress(TimeoutError, OSError):
                self.pushed.close(self.client, CLOSE_TIMEOUT)
        with contextlib.suppress(TimeoutError, OSError):
            self.client.close(timeout=CLOSE_TIMEOUT)


def raise_if_set(cancel: threading.Event | None) -> None:
    """Raise CallCancelled when the caller's cancel event is set."""
    if cancel is not None and cancel.is_set():
        raise CallCancelled("cancelled by the caller")


@contextlib.contextmanager
def _quiet_client() -> Iterator[None]:
    """Keep Dask's client from reporting the end of a scheduler that we end on purpose."""
    loggers = [logging.getLogger(name) for name in ("distributed.client", "distributed.core")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


class ComesBack(NannyPlugin):
    """On a nanny: starts the worker again that ends because it was cut off from the scheduler.

    Dask's worker tells its nanny then to end, too, and nobody would start that one again
    (https://github.com/dask/distributed/issues/6350 is why a worker does not reconnect). The new one
    waits for the scheduler. Where the scheduler ends on purpose it says so, and nanny and worker end.
    """

    name = "refrain-comes-back"
    idempotent = True  # a second flow that joins the cluster

    def setup(self, nanny: Nanny) -> None:
        """Called by Dask when the nanny has joined."""
        end = nanny.handlers["close_gracefully"]

        def close_gracefully(**words: Any) -> Any:
            return None if words.get("reason") in CUT_OFF else end(**words)

        nanny.handlers["close_gracefully"] = close_gracefully
