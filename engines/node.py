"""The node process: Dask's scheduler and one nanny per worker, apart from the flow process.

The flow process starts it (engines/cluster.py), writes a NodePlan as one line to its standard
input, reads the scheduler's address as one line from its standard output, and keeps the input open
for as long as it lives: end of file means that the flow process is gone, however it died, and then
everything below this process is killed. It leads a session of its own, so that Ctrl-C in the
terminal reaches the flow process alone, and it adopts the orphans of killed workers and ends them.

Why not in the flow process, as Dask's LocalCluster has it: workers started from there import the
user's main module, Prefect included; the scheduler competes with the flow's threads; and what a
killed worker leaves behind has nobody to clean it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import shutil
import sys
import threading
import time
from multiprocessing import forkserver

import dask
import psutil
from pydantic import BaseModel, ConfigDict

from engines import dask_settings
from engines.parent_death import adopt_orphans, descendants, kill_all

LOOPBACK = "127.0.0.1"
SWEEP = 0.5  # seconds between looks for orphans


class WorkerPlan(BaseModel):
    """One worker process."""

    model_config = ConfigDict(frozen=True)

    name: str
    pool: str
    slots: int  # engine calls at once
    env: dict[str, str]  # set before any engine library is imported


class NodePlan(BaseModel):
    """What a node process starts."""

    model_config = ConfigDict(frozen=True)

    scratch: str  # directory of this cluster alone; removed at the end
    no_workers_timeout: float  # seconds
    workers: tuple[WorkerPlan, ...]


def _start_fork_server() -> set[int]:
    """Start the process that workers are forked from; returns the pids of Python's helpers.

    It imports Dask once for all workers, in parallel with this process: a worker starts in 0.1 s
    instead of 2 s.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engines.worker_image"])
    forkserver.ensure_running()
    return {child.pid for child in psutil.Process().children()}


def _end(scratch: str) -> None:
    """Kill everything below this process, clean up and end it."""
    # The nannies notice and try to start new workers: nobody needs to read of that.
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, sys.stderr.fileno())
    me = os.getpid()
    until = time.monotonic() + 2
    while kill_all(descendants(me)) and time.monotonic() < until:
        time.sleep(0.02)
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


def _watch_parent(scratch: str) -> None:
    """Wait in threads until the flow process is gone, by either sign of it."""
    parent = os.getppid()

    def by_pipe() -> None:
        while sys.stdin.buffer.readline():
            pass
        _end(scratch)

    def by_pid() -> None:  # a forked child of the flow process may hold the pipe open
        while os.getppid() == parent:
            time.sleep(SWEEP)
        _end(scratch)

    threading.Thread(target=by_pipe, name="parent pipe", daemon=True).start()
    threading.Thread(target=by_pid, name="parent pid", daemon=True).start()


async def _end_orphans(helpers: set[int]) -> None:
    """Kill what dead workers left behind: adopted children that this process did not start."""
    me = psutil.Process()
    while True:
        await asyncio.sleep(SWEEP)
        orphans = [child for child in me.children() if child.pid not in helpers]
        kill_all(orphans)
        for orphan in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan.pid, os.WNOHANG)


async def _serve(plan: NodePlan, helpers: set[int], address_fd: int) -> None:
    dask_settings.apply()
    dask.config.set({"distributed.scheduler.no-workers-timeout": plan.no_workers_timeout})
    from distributed import Nanny, Scheduler  # reads the settings

    # Dask opens an HTTP port even without a dashboard: keep it, too, from the network.
    scheduler = await Scheduler(
        host=LOOPBACK, port=0, dashboard=False, dashboard_address=f"{LOOPBACK}:0"
    )
    os.write(address_fd, f"{scheduler.address}\n".encode())
    os.close(address_fd)
    sweep = asyncio.create_task(_end_orphans(helpers))
    nannies = [
        Nanny(
            scheduler.address,
            name=worker.name,
            nthreads=worker.slots + 1,
            resources={worker.pool: worker.slots},
            env=worker.env,
            memory_limit=0,
            local_directory=plan.scratch,
            silence_logs="ERROR",
            host=LOOPBACK,
            dashboard_address=f"{LOOPBACK}:0",
        )
        for worker in plan.workers
    ]
    await asyncio.gather(*nannies)
    await sweep


def main() -> None:
    """Serve until the flow process ends."""
    adopt_orphans()
    address_fd = os.dup(sys.stdout.fileno())  # not inherited, unlike standard output, which
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # from here on is everybody's, for people
    helpers = _start_fork_server()
    plan = NodePlan.model_validate(json.loads(sys.stdin.buffer.readline()))
    _watch_parent(plan.scratch)
    try:
        asyncio.run(_serve(plan, helpers, address_fd))
    finally:
        _end(plan.scratch)


if __name__ == "__main__":
    main()
