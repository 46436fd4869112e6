"""The Dask cluster: start or join it, find its workers, kill and restart them, end it.

Calls on engines are in engines/calls.py, gangs in engines/gang.py. This module imports no engine
library; it runs in the flow process.
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
from typing import Any

from distributed import Client

from configs.cluster import ClusterConfig
from engines.failures import CallCancelled, ClusterLost, NoWorkers
from engines.host import HOST, EngineHost
from engines.launch import NodeProcess
from engines.membership import Member, allowed_failures, by_name, kill_worker, list_workers
from engines.node import WorkerPlan
from engines.on_worker import examine
from engines.placement import check_seated, place_local

ASK_TIMEOUT = 30.0  # seconds that the scheduler or a nanny may take to answer
KILL_TIMEOUT = 5.0  # seconds until the scheduler must have noticed that a worker was killed
CLOSE_TIMEOUT = 1.0  # seconds for the client's farewell
SCAN_AGE = 1.0  # seconds for which a list of workers is good enough to see that one is gone
Environments = Mapping[str, Mapping[str, str]]


class Cluster:
    """A running cluster; a context manager that ends it. Safe to use from several threads."""

    def __init__(
        self,
        config: ClusterConfig,
        client: Client,
        node: NodeProcess | None = None,
        logs: Path | None = None,
    ) -> None:
        """`node`: of a local cluster; `logs`: directory of its workers' log files."""
        self.config = config
        self.client = client
        self.logs = logs
        self._node = node
        self._scan_lock = threading.Lock()
        self._scanned: tuple[float, dict[str, Member]] = (-SCAN_AGE, {})
        self._names: dict[str, str] = {}  # of every address ever seen
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

    # -- workers ---------------------------------------------------------------------------------

    def members(self, pool: str | None = None, max_age: float = 0.0) -> dict[str, Member]:
        """Live workers by name, in natural order; of one pool or of all.

        `max_age`: seconds for which an earlier look will do.
        """
        if pool is not None and pool not in self.config.pools:
            raise ValueError(f"{pool!r} is no pool. The pools are {sorted(self.config.pools)}.")
        with self._scan_lock:
            when, found = self._scanned
            if time.monotonic() - when > max_age:
                found = self._scan()
                self._scanned = (time.monotonic(), found)
        return {name: one for name, one in found.items() if pool in (None, one.pool)}

    def _scan(self) -> dict[str, Member]:
        try:
            listed = self.ask(self.client.run_on_scheduler, list_workers, timeout=ASK_TIMEOUT)
        except TimeoutError:
            self._lost = (
                f"the Dask scheduler has not answered for {ASK_TIMEOUT:g} s. "
                "The run can be resumed."
            )
            raise ClusterLost(self._lost) from None
        found = []
        for name, address, resources in listed:
            pools = [pool for pool in self.config.pools if pool in resources]
            if pools:
                found.append(Member(name=name, address=address, pool=pools[0]))
            self._names[address] = name
        return {one.name: one for one in sorted(found, key=by_name)}

    def workers(self, pool: str) -> dict[str, str]:
        """Addresses of a pool's live workers by name. Ask anew on every attempt: they change."""
        return {name: one.address for name, one in self.members(pool).items()}

    def name_of(self, address: str) -> str:
        """Name of the worker that has or had an address."""
        return self._names.get(address, address)

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

    def pool_of(self, address: str, max_age: float = SCAN_AGE) -> str | None:
        """Pool of a live worker; None when there is none at this address (any more)."""
        for age in (max_age, 0.0):
            for one in self.members(max_age=age).values():
                if one.address == address:
                    return one.pool
        return None

    def wait(
        self,
        pool: str,
        n: int = 1,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
    ) -> dict[str, str]:
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
            time.sleep(0.05 if waited < 2 else 0.25)
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

    def restart(self, names: Iterable[str], timeout: float = 30.0) -> dict[str, str]:
        """Kill workers and wait until they are back; returns their new addresses by name.

        Names that are not back within `timeout` seconds are missing from the result.
        """
        wanted = set(names)
        before = {one.address for one in self.members().values() if one.name in wanted}
        self.kill(before)
        until = time.monotonic() + timeout
        while True:
            back = {
                one.name: one.address
                for one in self.members().values()
                if one.name in wanted and one.address not in before
            }
            if len(back) == len(wanted) or time.monotonic() >= until:
                return back
            time.sleep(0.05)

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
            return self.client.sync(bounded)
        except TimeoutError:
            self.check()
            raise TimeoutError(f"no answer from the cluster within {timeout:g} s") from None
        except OSError as error:
            self.check()
            if self._answers():  # then it is a worker that does not
                raise TimeoutError(f"a worker cannot be reached: {error}") from error
            raise ClusterLost(f"the Dask scheduler cannot be reached: {error}") from error

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
        if self.client.status not in ("running", "connecting"):
            raise ClusterLost(
                f"the connection to the Dask scheduler is {self.client.status}. "
                "The run can be resumed."
            )

    def close(self) -> None:
        """End it all. A local cluster's processes, and what they started, are gone on return.

        A cluster that was joined goes on without us.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            with _quiet_client():
                try:
                    if self._node is not None:
                        self._node.end()
                finally:
                    with contextlib.suppress(TimeoutError, OSError):
                        self.client.close(timeout=CLOSE_TIMEOUT)


def raise_if_set(cancel: threading.Event | None) -> None:
    """Raise CallCancelled when the caller's cancel event is set."""
    if cancel is not None and cancel.is_set():
        raise CallCancelled("cancelled by the caller")


def open_cluster(
    config: ClusterConfig,
    worker_env: Environments | None = None,
    logs: Path | None = None,
    cancel: threading.Event | None = None,
) -> Cluster:
    """Start or join the cluster and wait until every pool has its workers.

    Use it as a context manager. `worker_env`: environment variables of the workers by pool; the
    pools' own `env` goes before it. `logs`: directory for a file per local worker with what it and
    its children print; without it they print where this process does. `cancel` ends the wait.
    Raises ValueError for a plan that cannot fit, NoWorkers when workers are missing after
    cluster.start_timeout.
    """
    env = {
        pool: {**(worker_env or {}).get(pool, {}), **wanted.env}
        for pool, wanted in config.pools.items()
    }
    if config.kind == "address":
        cluster = _join(config)
        plugin = EngineHost(env=env)
    else:
        cluster = _start(config, env, logs)
        plugin = EngineHost(logs=str(logs) if logs is not None else None)
    try:
        cluster.ask(cluster.client.register_plugin, plugin, name=HOST)
        for pool, wanted in config.pools.items():
            cluster.wait(pool, wanted.workers, config.start_timeout, cancel)
        if config.kind == "address":
            _check_members(cluster)
    except BaseException:
        cluster.close()
        raise
    return cluster


def _start(config: ClusterConfig, env: Environments, logs: Path | None) -> Cluster:
    """Start the node process and connect to the scheduler in it."""
    placement = place_local(config.pools)
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    node = NodeProcess(
        [
            WorkerPlan(
                name=seat.name,
                pool=seat.pool,
                slots=config.pools[seat.pool].slots,
                env={**seat.env, **env[seat.pool]},
            )
            for seat in placement.seats
        ],
        config.no_workers_timeout,
        config.start_timeout,
    )
    try:
        return Cluster(config, _connect(node.address, config.start_timeout), node, logs)
    except BaseException:
        node.end()
        raise


def _join(config: ClusterConfig) -> Cluster:
    """Join a running cluster, if its scheduler keeps our promises."""
    assert config.address is not None
    try:
        client = _connect(config.address, min(config.start_timeout, 30.0))
    except (OSError, TimeoutError) as error:
        raise ValueError(
            f"cluster.address = {config.address} does not answer ({error}). Start the Dask "
            "scheduler there, or set cluster.kind = local and cluster.address = null."
        ) from error
    cluster = Cluster(config, client)
    allowed = cluster.ask(client.run_on_scheduler, allowed_failures)
    if allowed:
        cluster.close()
        raise ValueError(
            f"The scheduler at {config.address} re-runs a dead worker's calls (allowed-failures = "
            f"{allowed}), so an update could be applied twice. Start it with "
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=0."
        )
    return cluster


def _connect(address: str, timeout: float) -> Client:
    return Client(address, timeout=timeout, set_as_default=False, name="refrain")


def _check_members(cluster: Cluster) -> None:
    """Refuse workers that others started otherwise than the plan needs them."""
    members = cluster.members()
    answers = cluster.ask(
        cluster.client.run, examine, workers=[one.address for one in members.values()]
    )
    for one in members.values():
        traits = answers[one.address]
        if not traits.nanny:
            raise ValueError(
                f"Worker {one.name} at {one.address} has no nanny, so nobody would start it again. "
                "Start it without --no-nanny."
            )
        if traits.daemonic:
            raise ValueError(
                f"Worker {one.name} at {one.address} may not start processes, which vLLM does. "
                "Start it with DASK_DISTRIBUTED__WORKER__DAEMON=False."
            )
    check_seated(
        cluster.config.pools,
        {one.name: (one.pool, answers[one.address].node) for one in members.values()},
    )


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
