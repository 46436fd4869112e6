"""What the flow process runs on workers, to reach their engine hosts.

`build`, `call` and `free_port` as Dask tasks, in the worker's threads; the rest by
`client.run`, past any call that occupies the worker. An engine's exception comes back as a record.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import TypeVar

from distributed import Worker, get_worker, secede

from engines.failures import EngineMissing, Failure, capture
from engines.workers.engine import Call, Engine, EngineSpec
from engines.workers.host import HOST, EngineHost
from engines.workers.messages import BuildReport, CallResult, HostStatus, WorkerInfo
from engines.workers.placement import find_free_port, this_node
from engines.workers.pushed import push
from engines.workers.spent import METER
from engines.workers.worker_metrics import WorkerMetrics
from storage.objects.usage import COUNTER

R = TypeVar("R")  # what a call returns


def host_of(worker: Worker) -> EngineHost:
    """The engine host of a worker."""
    plugin = worker.plugins.get(HOST)
    if not isinstance(plugin, EngineHost):
        raise EngineMissing(f"worker {worker.name} has no engine host")
    return plugin


def _recorded(run: Callable[[], R]) -> CallResult[R]:
    """The boundary where an engine's exception becomes a record that travels."""
    value: R | None = None
    failure: Failure | None = None
    try:
        value = run()
    except (Exception, SystemExit) as error:
        failure = capture(error)
    process = f"{socket.gethostname()}:{os.getpid()}"
    usage, spent = COUNTER.total(), METER.spent()
    return CallResult(value=value, failure=failure, process=process, usage=usage, spent=spent)


def build(role: str, spec: EngineSpec[Engine], token: str) -> CallResult[BuildReport]:
    """Dask task: `EngineHost.build`; the value is a BuildReport."""
    host = host_of(get_worker())
    return _recorded(lambda: host.build(role, spec, token))


def call(
    request: Call[R], token: str, limit: float, topic: str, aside: bool = False
) -> CallResult[R] | None:
    """Dask task: `EngineHost.call`; its CallResult is pushed, or returned where it is large.

    aside: whether it leaves the worker's threads to others, for one of its own.
    """
    worker = get_worker()
    if aside:
        secede()
    host = host_of(worker)
    ended = _recorded(lambda: host.answer(request, token, limit))
    return push(worker, topic, token, ended)


async def aside(
    request: Call[R], token: str, limit: float | None, dask_worker: Worker
) -> CallResult[R]:
    """By client.run: `EngineHost.call` in a thread of its own, past the worker's slots."""
    host = host_of(dask_worker)

    def run() -> CallResult[R]:
        return _recorded(lambda: host.answer(request, token, limit))

    return await asyncio.get_running_loop().run_in_executor(host.control, run)


async def stop(role: str, dask_worker: Worker) -> CallResult[bool]:
    """By client.run: `EngineHost.stop`; the value is whether there was an engine."""
    host = host_of(dask_worker)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(host.control, _recorded, lambda: host.stop(role))


def status(dask_worker: Worker) -> HostStatus:
    """By client.run: `EngineHost.status`."""
    return host_of(dask_worker).status()


async def measure(dask_worker: Worker) -> WorkerMetrics:
    """By client.run: what the worker measures of itself, in a thread past its slots."""
    host = host_of(dask_worker)
    return await asyncio.get_running_loop().run_in_executor(host.control, host.measure)


def examine(dask_worker: Worker) -> WorkerInfo:
    """By client.run: what a worker that others started is like."""
    return WorkerInfo(
        node=this_node(),
        nanny=dask_worker.nanny is not None,
        daemonic=multiprocessing.current_process().daemon,
    )


def free_port(host: str) -> CallResult[int]:
    """Dask task: a TCP port of this machine that is free now, on the interface of `host`."""
    return _recorded(lambda: find_free_port(host))
