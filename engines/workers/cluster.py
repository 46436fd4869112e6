"""A running Dask cluster: find its workers, kill and restart them, end it.

How a cluster is started or joined is in engines/clusters/, calls on engines in
engines/workers/calls.py, gangs in engines/workers/gang.py. This module imports no engine library;
it runs in the flow process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from distributed import Client

from configs.cluster import ClusterConfig
from engines.failures import CallCancelled, ClusterLost, NoWorkers
from engines.processes.certificates import Certificates
from engines.processes.node_process import NodeProcess
from engines.workers.call_watch import CallWatch
from engines.workers.devices import DeviceTurns
from engines.workers.membership import (
    SCAN_AGE,
    ListedWorker,
    Member,
    TellsOfWorkers,
    WorkerTable,
    kill_worker,
    list_workers,
)
from engines.workers.messages import CallResult
from engines.workers.outages import Outages
from engines.workers.pushed import PushedResults
from engines.workers.sending import Sender
from engines.workers.spent import Spent
from storage.objects.usage import Usage

ASK_TIMEOUT = 30.0  # seconds that the scheduler or a nanny may take to answer
KILL_TIMEOUT = 5.0  # seconds until the scheduler must have noticed that a worker was killed
CLOSE_TIMEOUT = 1.0  # seconds for the client's farewell
WORD = 1.0  # seconds in which the scheduler's word of a lost worker follows its loss
GONE = "its process ended or its host cannot be reached"
AFTERMATH = 2.0  # seconds in which the end of a process becomes known once its sockets have closed

Found = TypeVar("Found", Member, str)


class RemoteWorkers(Protocol):
    """Workers that run elsewhere on our behalf: Slurm jobs, pods, processes behind SSH."""

    def leaving(self) -> frozenset[str]:
        """Names of workers that will end soon and are being replaced."""

    def failure(self) -> str | None:
        """Why no more workers will come; None while all is well."""

    def watch(self, cluster: Cluster) -> None:
        """Begin to replace workers that end."""

    def certificate_files(self) -> Certificates | None:
        """The cluster's certificates as files, where they were put for the workers."""

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            found: list[ListedWorker] = self.ask(
                self.client.run_on_scheduler, list_workers, timeout=ASK_TIMEOUT
            )
        except TimeoutError:
            self._lost = (
                f"the Dask scheduler has not answered for {ASK_TIMEOUT:g} s. "
                "The run can be resumed."
            )
            raise ClusterLost(self._lost) from None
        return found

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
        seen = self.table.known()
        return None if seen is None else self._staying(pool, seen.addresses[pool])

    def staying(self, pool: str, max_age: float = 0.0) -> Mapping[str, Member]:
        """The pool's workers that get calls: those that stay, and until they are enough, others."""
        return self._staying(pool, self.members(pool, max_age))

    def _staying(self, pool: str, found: Mapping[str, Found]) -> Mapping[str, Found]:
        leaving = self._remote.leaving() if self._remote is not None else frozenset()
        if found.keys().isdisjoint(leaving):
            return found
        spare = self.config.pools[pool].workers - len(found.keys() - leaving)
        kept = [name for name in found if name in leaving][: max(spare, 0)]
        return {name: one for name, one in found.items() if name not in leaving or name in kept}

    def _check_pool(self, pool: str) -> None:
        if pool not in self.config.pools:
            raise ValueError(f"{pool!r} is no pool. The pools are {sorted(self.config.pools)}.")

    def name_of(self, address: str) -> str:
        """Name of the worker that has or had an address."""
        return self.table.name_of(address)

    def told(self, pool: str, ended: CallResult) -> None:
        """Take what a pool's worker process says with a call: what it has used since it began."""
        process, usage, spent = ended.process, ended.usage, ended.spent
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
        found = self.table.look(max_age).at.get(address)
        return found or self.table.look(0.0).at.get(address)

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
        while len(found := self.workers(pool)) < n:
            waited = time.monotonic() - began
            if waited >= limit:
                raise NoWorkers(pool, waited, len(found), n)
            raise_if_set(cancel)
            cause = self.table.last_loss(pool)
            self.outages.waiting(pool, len(found), n, limit - waited, limit, cause)
            time.sleep(0.05 if waited < 2 else 0.25)
        self.outages.over(pool)
        return found

    def kill(self, addresses: Iterable[str]) -> list[str]:
        """Kill workers with their whole process trees; their nannies start new ones.

        By address, so that a worker that has been restarted meanwhile is left alone. Returns the
        addresses that are gone; does not wait for the new workers.
        """
        targets = set(addresses) & {one.address for one in self.members().values()}
        if not targets:
            return []
        with contextlib.suppress(TimeoutError):
            self.ask(
                self.client.run, kill_worker, workers=list(targets), nanny=True, on_error="ignore"
            )
        until = time.monotonic() + KILL_TIMEOUT
        while True:
            left = targets & {one.address for one in self.members().values()}
            if not left or time.monotonic() >= until:
                return sorted(targets - left)
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

    def why_lost(self, seen: str) -> ClusterLost:
        """What ended the cluster, or what was `seen` of it if nothing says so within seconds.

        The sockets of a process that dies close a moment before the kernel tells its end.
        """
        until = time.monotonic() + AFTERMATH
        while time.monotonic() < until:
            try:
                self.check()
            except ClusterLost as error:
                return error
            time.sleep(0.05)
        return ClusterLost(f"{seen}. The run can be resumed.")

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
