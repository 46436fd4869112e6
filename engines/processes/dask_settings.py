"""Dask's settings in the processes that we start, and why each is as it is.

Dask reads some of them when it is imported: call `apply` before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dask

if TYPE_CHECKING:
    from distributed import Scheduler

SETTINGS = {
    # vLLM starts processes; daemonic ones may not (https://github.com/dask/distributed/issues/2718).
    "distributed.worker.daemon": False,
    "distributed.worker.multiprocessing-method": "forkserver",
    "distributed.worker.profile.enabled": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.scheduler.allowed-failures": 0,  # else a dead worker's finished task runs again
    "distributed.scheduler.worker-ttl": None,  # a call may hold the GIL for long
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.diagnostics.nvml": False,
    # What is submitted while something runs joins one history, which never ends where some shard
    # always runs: the scheduler would grow by a kilobyte a call for as long as a run lasts.
    "distributed.diagnostics.computations.max-history": 0,
    "distributed.scheduler.preload": [__name__],  # dask_setup below
    # Every connection keeps its last messages, for developers: the scheduler 1,000 for each worker,
    # which are megabytes where a message is a call.
    "distributed.admin.low-level-log-length": 10,
    "distributed.admin.tick.limit": "1h",  # the same: no warning about a held GIL
    # Every scheduler, nanny and worker looks fifty times a second whether its loop is late, which is
    # for that warning, and twice at the processor and memory of its process, for a dashboard.
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.admin.system-monitor.gil.enabled": False,
    # A dead worker or scheduler is reported where its call was waited for.
    "distributed.logging": {
        "distributed": "error",
        "distributed.scheduler": "critical",
        "distributed.worker": "critical",
    },
}


def apply() -> None:
    """Set them in this process."""
    dask.config.set(SETTINGS)


def dask_setup(scheduler: Scheduler) -> None:
    """What Dask calls in a scheduler: it shall keep no statistics of calls that have ended.

    Dask makes a span, with its groups of tasks, whenever a call comes to an idle scheduler, and never
    lets go of one; there is no setting against it.
    """
    from distributed.spans import SpansSchedulerExtension

    class NoSpans(SpansSchedulerExtension):
        """Takes what the scheduler and its workers tell, and keeps none of it."""

        def observe_tasks(self, *args: Any, **kwargs: Any) -> dict[Any, dict[Any, Any]]:
            return {}

        def heartbeat(self, *args: Any) -> None:
            pass

    scheduler.extensions["spans"] = NoSpans(scheduler)
