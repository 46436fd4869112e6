"""The Dask cluster: start or join it, find its workers, kill and restart them, end it.

Calls on engines are in engines/calls.py, gangs in engines/gang.py. This module imports no engine
library; it runs in the flow process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from distributed import Client, Nanny, Scheduler

from configs.cluster import ClusterConfig
from engines.failures import CallCancelled, ClusterLost, NoWorkers
from engines.host import HOST, EngineHost
from engines.node import NodePlan, WorkerPlan
from engines.parent_death import kill_all, kill_tree, session
from engines.placement import Placement, place_local

ASK_TIMEOUT = 10.0  # seconds that the scheduler or a nanny may take to answer
KILL_TIMEOUT = 5.0  # seconds until the scheduler must have noticed that a worker was killed
# Python's helper reports what killed workers left to it as leaks, after it has cleaned up.
NO_LEAK_WARNING = "ignore::UserWarning:multiprocessing.resource_tracker"
SCAN_AGE = 1.0  # seconds for which a list of workers is good enough to see that one is gone
Environments = Mapping[str, Mapping[str, str]]


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


def _list_workers(dask_scheduler: Scheduler) -> list[tuple[str, str, list[str]]]:
    """On the scheduler: name, address and resources of the workers that are ready."""
    return [
        (str(worker.name), worker.address, list(worker.resources))
        for worker in dask_scheduler.workers.values()
        if worker.status.name == "running"
    ]


def _allowed_failures(dask_scheduler: Scheduler) -> int:
    return int(dask_scheduler.allowed_failures)


def _kill_worker(dask_worker: Nanny) -> list[int]:
    """On a nanny: kill its worker with everything below; the nanny then starts another."""
    pid = dask_worker.pid
    return kill_tree(pid) if pid else []


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts worker-2 before worker-10."""
    return [(int(part or 0) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]


class Cluster:
    """A running cluster; a context manager that ends it. Safe to use from several threads."""

    def __init__(
        self,
        config: ClusterConfig,
        client: Client,
        node: subprocess.Popen[bytes] | None,
        scratch: str | None,
    ) -> None:
        self.config = config
        self.client = client
        self._node = node  # the local node process, if this cluster has one
        self._scratch = scratch
        self._scan_lock = threading.Lock()
        self._scanned: tuple[float, dict[str, Member]] = (-SCAN_AGE, {})
        self._names: dict[str, str] = {}  # every address ever seen, for messages
        self._turns = {pool: threading.Lock() for pool in config.pools}
        self._closed = False

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
        listed = self.ask(self.client.run_on_scheduler, _list_workers)
        found = []
        for name, address, resources in listed:
            for pool in self.config.pools:
                if pool in resources:
                    found.append(Member(name=name, address=address, pool=pool))
            self._names[address] = name
        return {one.name: one for one in sorted(found, key=lambda one: _natural(one.name))}

    def workers(self, pool: str) -> dict[str, str]:
        """Addresses of a pool's live workers by name. Ask anew on every attempt: they change."""
        return {name: one.address for name, one in self.members(pool).items()}

    def name_of(self, address: str) -> str:
        """Name of the worker that has or had an address."""
        return self._names.get(address, address)

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
                self.client.run, _kill_worker, workers=list(targets), nanny=True, on_error="ignore"
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
            raise ClusterLost(f"the Dask scheduler cannot be reached: {error}") from error

    def check(self) -> None:
        """Raise ClusterLost when the cluster is closed or its scheduler is known to be gone."""
        if self._closed:
            raise ClusterLost("the cluster has been closed")
        if self._node is not None and (code := self._node.poll()) is not None:
            raise ClusterLost(
                f"the process of the Dask scheduler ended (exit status {code}), and all workers "
                "with it. The run can be resumed."
            )
        if self.client.status not in ("running", "connecting"):
            raise ClusterLost(
                f"the connection to the Dask scheduler is {self.client.status}. "
                "The run can be resumed."
            )

    def close(self) -> None:
        """End it all. A local cluster's processes, and what they started, are gone on return."""
        if self._closed:
            return
        self._closed = True
        try:
            _quiet_client()
            with contextlib.suppress(TimeoutError, OSError):
                self.client.close(timeout=1)
        finally:
            if self._node is not None:
                _end_node(self._node, self._scratch)


def raise_if_set(cancel: threading.Event | None) -> None:
    """Raise CallCancelled when the caller's cancel event is set."""
    if cancel is not None and cancel.is_set():
        raise CallCancelled("cancelled by the caller")


def open_cluster(config: ClusterConfig, worker_env: Environments | None = None) -> Cluster:
    """Start or join the cluster and wait until every pool has its workers.

    Use it as a context manager. `worker_env`: environment variables of the workers by pool, on top
    of the pools' own `env`; they are for local workers only.
    Raises ValueError for a plan that cannot fit, NoWorkers when workers are missing after
    cluster.start_timeout.
    """
    if config.kind == "address":
        assert config.address is not None
        cluster = _join(config, config.address)
    else:
        cluster = _start(config, place_local(config.pools), worker_env or {})
    try:
        cluster.ask(cluster.client.register_plugin, EngineHost(), name=HOST)
        for pool, wanted in config.pools.items():
            cluster.wait(pool, wanted.workers, config.start_timeout)
    except BaseException:
        cluster.close()
        raise
    return cluster


def _join(config: ClusterConfig, address: str) -> Cluster:
    """Join a running cluster, if its settings keep our promises."""
    try:
        client = _connect(address, min(config.start_timeout, 30.0))
    except (OSError, TimeoutError) as error:
        raise ValueError(
            f"cluster.address = {address} does not answer ({error}). Start the Dask scheduler "
            "there, or set cluster.kind = local and cluster.address = null."
        ) from error
    cluster = Cluster(config, client, None, None)
    allowed = cluster.ask(client.run_on_scheduler, _allowed_failures)
    if allowed != 0:
        cluster.close()
        raise ValueError(
            f"The scheduler at {address} re-runs a dead worker's calls (allowed-failures = "
            f"{allowed}), so an update could be applied twice. Start it with "
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=0."
        )
    return cluster


def _connect(address: str, timeout: float) -> Client:
    return Client(address, timeout=timeout, set_as_default=False, name="refrain")


def _start(config: ClusterConfig, placement: Placement, worker_env: Environments) -> Cluster:
    """Start the node process and connect to the scheduler in it."""
    scratch = tempfile.mkdtemp(prefix="refrain-")
    plan = NodePlan(
        scratch=scratch,
        no_workers_timeout=config.no_workers_timeout,
        workers=tuple(
            WorkerPlan(
                name=seat.name,
                pool=seat.pool,
                slots=config.pools[seat.pool].slots,
                env={
                    **seat.env,
                    **worker_env.get(seat.pool, {}),
                    **config.pools[seat.pool].env,
                },
            )
            for seat in placement.seats
        ),
    )
    node = subprocess.Popen(
        [sys.executable, "-W", NO_LEAK_WARNING, "-m", "engines.node"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
            # The image that workers are forked from must have no thread pools.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        },
    )
    try:
        assert node.stdin is not None
        node.stdin.write(json.dumps(plan.model_dump()).encode() + b"\n")
        node.stdin.flush()
        address = _read_address(node, config.start_timeout)
        client = _connect(address, config.start_timeout)
    except BaseException:
        _end_node(node, scratch)
        raise
    return Cluster(config, client, node, scratch)


def _read_address(node: subprocess.Popen[bytes], timeout: float) -> str:
    """The line that the node process writes when its scheduler listens."""
    assert node.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(node.stdout, selectors.EVENT_READ)
        if not selector.select(timeout):
            raise ClusterLost(f"the Dask scheduler did not start within {timeout:g} s")
    line = node.stdout.readline().decode().strip()
    if not line:
        raise ClusterLost(f"the Dask scheduler did not start (exit status {node.wait(5)})")
    return line


def _end_node(node: subprocess.Popen[bytes], scratch: str | None) -> None:
    """End the node process: it kills all below it when its input closes; make sure of it."""
    assert node.stdin is not None
    assert node.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        node.stdin.close()
    try:
        node.wait(3)
    except subprocess.TimeoutExpired:
        node.kill()
        node.wait(1)
    kill_all(session(node.pid))
    node.stdout.close()
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)


def _quiet_client() -> None:
    """Keep Dask's client from reporting the end of a scheduler that we end on purpose."""
    for name in ("distributed.client", "distributed.core", "distributed.comm"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
