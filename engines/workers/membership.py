"""Who belongs to a cluster: the questions put to its scheduler and its nannies, and their answers.

These functions run there, by `client.run` and `client.run_on_scheduler`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from distributed import Nanny, Scheduler

from engines.processes.process_tree import kill_tree


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
