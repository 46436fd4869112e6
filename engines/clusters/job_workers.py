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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import psutil

from configs.cluster import PoolConfig
from engines.processes.dask_settings import Certificates
from engines.processes.parent_death import adopt_orphans, die_with_parent
from engines.processes.process_setup import C_LIBRARIES
from engines.processes.process_tree import descendants, kill_all
from engines.workers.placement import this_node

LOOK_EVERY = 1.0  # seconds between looks at the workers
PAUSE = 1.0  # seconds until a worker that ended is started again; its connections close meanwhile
QUICK = 60.0  # seconds: a worker that ends sooner has not got to work
QUICK_DEATHS = 3  # of a worker, in a row, after which the job is given up
ANSWER_TIMEOUT = 5.0  # seconds for the scheduler's port to open
GRACE = 10.0  # seconds for the workers to end by themselves when the job is cancelled
DEATH_TIMEOUT = 60  # seconds that a worker looks for the scheduler
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


def tend(workers: Sequence[JobWorker], scheduler: str, signals: Sequence[int]) -> int:
    """Start workers again that end, as long as the scheduler is there; returns the exit code.

    `signals`: those to end that came in.
    """
    while not signals:
        time.sleep(LOOK_EVERY)
        ended = ended_of(workers)
        if not ended:
            continue
        if answers(scheduler):
            if not _started_again(ended, signals):
                return 1
        elif len(ended) == len(workers):
            return 0
    # Slurm tells every process of a job that it is cancelled.
    await_ends(workers)
    return 0


def ended_of(workers: Sequence[JobWorker]) -> list[JobWorker]:
    """Those that have ended; what they have left behind is killed."""
    ended = [worker for worker in workers if worker.ended()]
    kill_orphans({worker.process.pid for worker in workers if worker not in ended})
    return ended


def kill_orphans(alive: set[int]) -> None:
    """End what workers that died have left behind, on devices too; `alive`: pids of the others."""
    orphans = [child for child in psutil.Process().children() if child.pid not in alive]
    below = [process for orphan in orphans for process in descendants(orphan.pid)]
    kill_all([*orphans, *below])
    for orphan in orphans:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(orphan.pid, os.WNOHANG)


def await_ends(workers: Sequence[JobWorker]) -> None:
    """Give workers that are told to end time for it."""
    until = time.monotonic() + GRACE
    while not all(worker.ended() for worker in workers) and time.monotonic() < until:
        time.sleep(0.1)


def _started_again(ended: Sequence[JobWorker], signals: Sequence[int]) -> bool:
    """Start workers again; False where one of them never gets to work, so that the job is over."""
    for worker in ended:
        if worker.count_death() >= QUICK_DEATHS:
            worker.note(f"it did so at once {QUICK_DEATHS} times, so the whole job ends.")
            return False
    time.sleep(PAUSE)
    for worker in ended:
        if not signals:
            worker.note("it is started again.")
            worker.start()
    return True


def heard_signals(*numbers: int) -> list[int]:
    """Take signals from now on instead of ending by them; they are added to what this returns."""
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    for number in numbers:
        signal.signal(number, hear)
    return heard


def end_all() -> None:
    """End whatever runs below this process."""
    until = time.monotonic() + KILL_TIMEOUT
    while kill_all(descendants(os.getpid())) and time.monotonic() < until:
        time.sleep(0.02)


def worker_options(pool: str, slots: int, certificates: Certificates | None) -> list[str]:
    """Options of engines.clusters.worker for a pool's workers, in a job or not."""
    words = ["--death-timeout", str(DEATH_TIMEOUT)]
    words += ["--nthreads", str(slots + 1), "--resources", f"{pool}={slots}"]
    if certificates is not None:
        words += ["--protocol", "tls", "--tls-ca-file", certificates.ca]
        words += ["--tls-cert", certificates.cert, "--tls-key", certificates.key]
    return words


def worker_variables(config: PoolConfig, env: Mapping[str, str]) -> dict[str, str]:
    """Those of a pool's workers, in a job or not; `env`: what the pool's engines and settings add."""
    threads = str(config.threads)
    return {
        **C_LIBRARIES,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        **env,
        **({} if config.gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    }


def main() -> int:
    """Serve until the job ends or the scheduler is gone."""
    logs, count, each, scheduler, name_option, first, *options = sys.argv[1:]
    assert name_option == "--name"
    pool, _, number = first.rpartition("-")
    signals = heard_signals(signal.SIGTERM)
    adopt_orphans()
    devices = shares(this_node().gpus, int(count), int(each))
    names = [f"{pool}-{int(number) + n}" for n in range(int(count))]
    try:
        workers = [
            JobWorker(
                name,
                [scheduler, *options],
                {"CUDA_VISIBLE_DEVICES": gpus},
                Path(logs) / f"{name}.log",
            )
            for name, gpus in zip(names, devices, strict=True)
        ]
        return tend(workers, scheduler, signals)
    finally:
        end_all()


if __name__ == "__main__":
    sys.exit(main())
