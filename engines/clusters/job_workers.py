"""The workers of a Slurm job that has several (cluster.slurm.pools.NAME.workers_per_job).

    python -m engines.clusters.job_workers LOGS WORKERS GPUS SCHEDULER --name POOL-FIRST [OPTIONS]

starts engines.clusters.worker WORKERS times, as POOL-FIRST and the numbers after it, each with GPUS
of the job's devices and a log of its own in the folder LOGS. A worker that ends while the scheduler
is there is started again, and its neighbours go on. All end with this process, whatever ends that.

Not `srun`: a task of it may get a device cgroup of its own (--gpus-per-task), in which NCCL does not
find the neighbours' GPUs and leaves NVLink unused (https://github.com/NVIDIA/nccl/issues/1066). All
processes of the batch script share the job's. CUDA_VISIBLE_DEVICES is no such wall: since CUDA 10.1
NCCL opens a neighbour's memory also where that hides the device (NCCL's src/transport/p2p.cc).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import psutil

from engines.processes.parent_death import adopt_orphans, die_with_parent
from engines.processes.process_tree import descendants, kill_all
from engines.workers.placement import this_node

LOOK_EVERY = 1.0  # seconds between looks at the workers
PAUSE = 1.0  # seconds until a worker that ended is started again; its connections close meanwhile
QUICK = 60.0  # seconds: a worker that ends sooner has not got to work
QUICK_DEATHS = 3  # of a worker, in a row, after which the job is given up
ANSWER_TIMEOUT = 5.0  # seconds for the scheduler's port to open
GRACE = 10.0  # seconds for the workers to end by themselves when the job is cancelled
KILL_TIMEOUT = 5.0  # seconds for which killing goes on while processes appear


class JobWorker:
    """One of the job's workers: its process, and those that come after it."""

    def __init__(self, name: str, words: Sequence[str], env: dict[str, str], log: Path) -> None:
        self.name = name
        self._words = [*words, "--name", name]
        self._env = env
        self._log = log
        self._quick_deaths = 0
        self.start()

    def start(self) -> None:
        """Start its process."""
        self._began = time.monotonic()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engines.clusters.worker", *self._words],
                env={**os.environ, **self._env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,  # there is one thread only
            )

    def ended(self) -> bool:
        """Whether its process has ended."""
        return self.process.poll() is not None

    def count_death(self) -> int:
        """Of a worker that has ended: how often in a row, so far, it ended at once."""
        lived = time.monotonic() - self._began
        self._quick_deaths = self._quick_deaths + 1 if lived < QUICK else 0
        return self._quick_deaths

    def note(self, text: str) -> None:
        """Leave a line in the worker's log."""
        with self._log.open("a") as log:
            print(f"Worker {self.name} ended (status {self.process.returncode}): {text}", file=log)


def shares(gpus: Sequence[str], workers: int, each: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each worker; too short where the job has too few.

    Then the flow says so, which looks at every worker (engines/workers/placement.py).
    """
    return [",".join(gpus[n * each : (n + 1) * each]) for n in range(workers)]


def answers(scheduler: str) -> bool:
    """Whether the port of a scheduler, PROTOCOL://HOST:PORT, is open."""
    where = urlsplit(scheduler)
    try:
        socket.create_connection((where.hostname, where.port), ANSWER_TIMEOUT).close()
    except OSError:
        return False
    return True


def tend(workers: Sequence[JobWorker], scheduler: str, told: Sequence[int]) -> int:
    """Start workers again that end, as long as the scheduler is there; returns the exit code.

    `told`: signals to end that came in.
    """
    while not told:
        time.sleep(LOOK_EVERY)
        ended = [one for one in workers if one.ended()]
        kill_orphans({one.process.pid for one in workers if one not in ended})
        if not ended:
            continue
        if answers(scheduler):
            if not _started_again(ended, told):
                return 1
        elif len(ended) == len(workers):
            return 0
    # Slurm tells every process of a job that it is cancelled.
    until = time.monotonic() + GRACE
    while not all(one.ended() for one in workers) and time.monotonic() < until:
        time.sleep(0.1)
    return 0


def _started_again(ended: Sequence[JobWorker], told: Sequence[int]) -> bool:
    """Start workers again; False where one of them never gets to work, so that the job is over."""
    for one in ended:
        if one.count_death() >= QUICK_DEATHS:
            one.note(f"it did so at once {QUICK_DEATHS} times, so the whole job ends.")
            return False
    time.sleep(PAUSE)
    for one in ended:
        if not told:
            one.note("it is started again.")
            one.start()
    return True


def kill_orphans(known: set[int]) -> None:
    """End what workers that died have left behind: on its devices, too."""
    orphans = [child for child in psutil.Process().children() if child.pid not in known]
    below = [one for orphan in orphans for one in descendants(orphan.pid)]
    kill_all([*orphans, *below])
    for orphan in orphans:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(orphan.pid, os.WNOHANG)


def end_all() -> None:
    """End whatever runs below this process."""
    until = time.monotonic() + KILL_TIMEOUT
    while kill_all(descendants(os.getpid())) and time.monotonic() < until:
        time.sleep(0.02)


def main() -> int:
    """Serve until the job ends or the scheduler is gone."""
    logs, count, each, scheduler, name_option, first, *options = sys.argv[1:]
    assert name_option == "--name"
    pool, _, number = first.rpartition("-")
    told: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        told.append(signum)

    signal.signal(signal.SIGTERM, stop)
    adopt_orphans()
    own = shares(this_node().gpus, int(count), int(each))
    names = [f"{pool}-{int(number) + n}" for n in range(int(count))]
    try:
        workers = [
            JobWorker(
                name,
                [scheduler, *options],
                {"CUDA_VISIBLE_DEVICES": gpus},
                Path(logs) / f"{name}.log",
            )
            for name, gpus in zip(names, own, strict=True)
        ]
        return tend(workers, scheduler, told)
    finally:
        end_all()


if __name__ == "__main__":
    sys.exit(main())
