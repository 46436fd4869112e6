"""A look at a running cluster from a process that does not belong to it. Changes nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from operator import attrgetter

from distributed import Client

from engines.processes.certificates import Certificates
from engines.workers import on_worker
from engines.workers.membership import list_workers
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
        listed = client.run_on_scheduler(list_workers)
        answers = client.run(on_worker.status, on_error="ignore")
    except OSError as error:
        raise NotReached(f"The Dask scheduler at {address} ended while asked ({error}).") from error
    finally:
        client.close(timeout=1.0)
    return [
        WorkerView(
            name=one.name,
            address=one.address,
            pools=one.pools,
            processing=one.processing,
            status=answers.get(one.address),
        )
        for one in sorted(listed, key=attrgetter("name", "address"))
    ]
