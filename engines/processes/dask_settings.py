"""Dask's settings in the processes that we start, and why each is as it is.

Dask reads some of them when it is imported: call `apply` before that.
"""

import dask

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
    "distributed.admin.tick.limit": "1h",  # the same: no warning about a held GIL
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
