"""What the flow process runs on workers: the way to the engine host.

`build`, `call`, `collect` and `free_port` are Dask tasks and run in the worker's threads; the rest
goes by `client.run`, past any call that occupies the worker. Exceptions come back as records.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import Callable, Mapping
from typing import Any

from distributed import Worker, get_worker

from engines.failures import EngineMissing, capture
from engines.workers.engine import EngineSpec
from engines.workers.host import HOST, EngineHost
from engines.workers.messages import CallId, HostStatus, Outcome, Ticket, WorkerInfo
from engines.workers.placement import this_node
from storage.objects.usage import COUNTER, Usage


def host_of(worker: Worker) -> EngineHost:
    """The engine host of a worker."""
    plugin = worker.plugins.get(HOST)
    if not isinstance(plugin, EngineHost):
        raise EngineMissing(f"worker {worker.name} has no engine host")
    return plugin


def _outcome(run: Callable[[], Outcome]) -> Outcome:
    """The boundary where an engine's exception becomes a record that travels."""
    try:
        return run()
    except (Exception, SystemExit) as error:
        return Outcome(failure=capture(error))


def build(role: str, spec: EngineSpec) -> Outcome:
    """Dask task: `EngineHost.build`; the value is a BuildReport."""
    host = host_of(get_worker())
    return _outcome(lambda: Outcome(value=host.build(role, spec)))


def call(
    role: str, method: str, kwargs: Mapping[str, Any], call_id: CallId | None, ticket: Ticket
) -> Outcome:
    """Dask task: `EngineHost.call`."""
    host = host_of(get_worker())
    return _outcome(lambda: host.call(role, method, kwargs, call_id, ticket))


def collect(role: str, collector: str, method: str, parts: list[Any]) -> Outcome:
    """Dask task: join the ranks' results by the engine class' static method `collector`."""
    host = host_of(get_worker())
    return _outcome(lambda: host.collect(role, collector, method, parts))


async def control(
    role: str, method: str, kwargs: Mapping[str, Any], call_id: CallId | None, dask_worker: Worker
) -> Outcome:
    """By client.run: `EngineHost.call` in a thread of its own, past the worker's slots."""
    host = host_of(dask_worker)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(
        host.control, _outcome, lambda: host.call(role, method, kwargs, call_id)
    )


async def stop(role: str, dask_worker: Worker) -> Outcome:
    """By client.run: `EngineHost.stop`; the value is whether there was an engine."""
    host = host_of(dask_worker)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(
        host.control, _outcome, lambda: Outcome(value=host.stop(role))
    )


def status(dask_worker: Worker) -> HostStatus:
    """By client.run: `EngineHost.status`."""
    return host_of(dask_worker).status()


def store_usage() -> Usage:
    """By client.run: what this process has asked of the store since it began."""
    return COUNTER.total()


def examine(dask_worker: Worker) -> WorkerInfo:
    """By client.run: what a worker that others started is like."""
    return WorkerInfo(
        node=this_node(),
        nanny=dask_worker.nanny is not None,
        daemonic=multiprocessing.current_process().daemon,
    )


def free_port(host: str) -> Outcome:
    """Dask task: a TCP port of this machine that is free now, on the interface of `host`."""
    return _outcome(lambda: Outcome(value=_free_port(host)))


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
