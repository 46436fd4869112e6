"""A look at a running cluster from a process that does not belong to it. Changes nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from distributed import Client, Scheduler

from engines.processes.certificates import Certificates
from engines.workers import on_worker
from engines.workers.messages import HostStatus

TIMEOUT = 5.0  # seconds that the scheduler or a worker may take to answer


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


def list_queues(dask_scheduler: Scheduler) -> list[tuple[str, str, list[str], int]]:
    """On the scheduler: name, address, pools and calls in hand of each worker."""
    return [
        (str(worker.name), worker.address, list(worker.resources), len(worker.processing))
        for worker in dask_scheduler.workers.values()
    ]


def look(address: str, certificates: Certificates | None = None) -> list[WorkerView]:
    """Every worker of the scheduler at an address. Raises NotReached."""
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
        listed = client.run_on_scheduler(list_queues)
        answers = client.run(on_worker.status, on_error="ignore")
    finally:
        client.close(timeout=1.0)
    return [
        WorkerView(
            name=name,
            address=where,
            pools=tuple(pools),
            processing=processing,
            status=answers.get(where),
        )
        for name, where, pools, processing in sorted(listed)
    ]
