"""Looks at what workers and their machines do, for people. Nothing changes by them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from distributed import Client

from engines.failures import ClusterLost
from engines.processes.dask_settings import Certificates
from engines.workers import host
from engines.workers.cluster import Cluster, list_workers
from engines.workers.engine import HostStatus, RunningCall
from engines.workers.worker_metrics import machine_sample
from storage.tracking.machine_samples import MachineSample

TIMEOUT = 5.0  # seconds that the scheduler or a worker may take to answer
STATUS_TIMEOUT = 2.0  # seconds for which a worker is waited for
MACHINES_TIMEOUT = 10.0  # seconds for which machines are waited for
WORKERS_ASKED = 16  # workers that are asked


class NotReached(RuntimeError):
    """The scheduler does not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerView:
    """One worker."""

    name: str
    address: str
    pools: tuple[str, ...]
    processing: int  # calls handed to it, running or waiting for a slot
    status: HostStatus | None  # None: it did not answer in time


def look(address: str, certificates: Certificates | None = None) -> list[WorkerView]:
    """Every worker of the scheduler at an address, from a process that is not of its cluster.

    Raises NotReached.
    """
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    try:
        client = Client(
            address,
            timeout=TIMEOUT,
            set_as_default=False,
            name="refrain-inspect",
            security=certificates.security() if certificates is not None else None,
        )
    except (OSError, TimeoutError) as error:
        raise NotReached(f"The Dask scheduler at {address} does not answer ({error}).") from error
    try:
        listed = client.run_on_scheduler(list_workers)
        answers = client.run(host.status, on_error="ignore")
    except OSError as error:
        raise NotReached(f"The Dask scheduler at {address} ended while asked ({error}).") from error
    finally:
        client.close(timeout=1.0)
    return [
        WorkerView(
            name=worker.name,
            address=worker.address,
            pools=worker.pools,
            processing=worker.processing,
            status=answers.get(worker.address),
        )
        for worker in sorted(listed, key=attrgetter("name", "address"))
    ]


def start_phases(cluster: Cluster) -> dict[str, str]:
    """Worker -> what the engine that it starts reported last; of workers that answer at once."""
    return {
        worker: call.phase
        for worker, calls in running_calls(cluster).items()
        for call in calls
        if call.phase
    }


def running_calls(
    cluster: Cluster, pools: Sequence[str | None] = (None,)
) -> dict[str, tuple[RunningCall, ...]]:
    """Worker -> the calls that it runs; of workers that answer at once, the first ones of each pool.

    pools: whose; None: all together.
    """
    share = WORKERS_ASKED // max(1, len(pools))
    try:
        addresses = [
            member.address
            for pool in pools
            for member in list(cluster.members(pool, max_age=10.0).values())[: max(1, share)]
        ]
        answers: Mapping[str, HostStatus] = cluster.ask_each(host.status, addresses, STATUS_TIMEOUT)
    except (ClusterLost, TimeoutError, OSError, ValueError):
        return {}
    return {status.worker: status.running for status in answers.values()}


def look_at_machines(cluster: Cluster, besides: str = "") -> list[MachineSample]:
    """A sample of each machine that has a live worker, taken by one of them; but for host `besides`.

    Those that do not answer are left out; none where the cluster is gone.
    """
    by_host: dict[str, str] = {}
    try:
        for member in cluster.members(max_age=60.0).values():
            by_host.setdefault(member.host, member.address)
        samples: Mapping[str, MachineSample] = cluster.ask_each(
            machine_sample, by_host.values(), MACHINES_TIMEOUT
        )
    except (ClusterLost, TimeoutError, OSError, ValueError):
        return []
    return sorted(
        (each for each in samples.values() if each.host != besides), key=attrgetter("host")
    )
