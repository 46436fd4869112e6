"""Workers as Slurm jobs: a job array for each pool, kept at its size until the cluster closes.

The scheduler runs in this machine's node process, which cancels the jobs too should the flow
process be killed. A job that nears its time limit is replaced by a new task of its pool's array;
engines/workers/cluster.py gives a leaving worker no calls once others have joined.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shlex
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Set
from pathlib import Path

from configs.cluster import ClusterConfig
from engines.clusters.job_workers import worker_options, worker_variables
from engines.clusters.opening import Environments, StartedCluster, listening_address
from engines.clusters.slurm_jobs import BusySlurm, Task, listed, slurm_says
from engines.failures import ClusterLost
from engines.processes.dask_settings import Certificates
from engines.processes.node import NodePlan, NodeProcess, python_path
from engines.workers.calls import status_of
from engines.workers.cluster import Cluster, RemoteWorkers

log = logging.getLogger(__name__)

LOOK_EVERY = 5.0  # seconds between looks at the queue
IDLE = 10.0  # seconds that the workers of a replaced job are idle before it is cancelled
END_TIMEOUT = 20.0  # seconds for cancelled jobs to leave the queue
QUICK_DEATHS = 3  # times that all jobs of a pool may end in a row before one of them joined


def job_scripts(
    config: ClusterConfig,
    prefix: str,
    env: Environments,
    scheduler: str,
    certificates: Certificates | None,
) -> dict[str, str]:
    """Pool -> the batch script of its array PREFIX-POOL, which becomes the worker, or its workers.

    Args:
        env: variables of the workers, by pool. scheduler: its address. certificates: as paths.
    """
    paths = {"PYTHONPATH": python_path()} if config.slurm.python is None else {}
    scripts = {}
    for pool, workers in config.pools.items():
        variables = paths | worker_variables(workers, env.get(pool, {}))
        lines = [
            "#!/usr/bin/env bash",
            "",
            *(f"#SBATCH {directive}" for directive in directives(config, prefix, pool)),
            *filter(None, config.slurm.prologue),
            *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
            " ".join(worker_command(config, prefix, pool, scheduler, certificates)),
            "",
        ]
        scripts[pool] = "\n".join(lines)
    return scripts


def directives(config: ClusterConfig, prefix: str, pool: str) -> list[str]:
    """What a job of a pool asks Slurm for, the settings' own directives last."""
    workers, slurm = config.pools[pool], config.slurm
    settings, per_job = slurm.pools.get(pool), slurm.workers_per_job(pool)
    partition = (settings and settings.partition) or slurm.partition
    limit = (settings and settings.time_limit) or slurm.time_limit
    # One task, and so one node, whatever starts processes in it.
    words = [f"-J {prefix}-{pool}"]
    words += [] if partition is None else [f"-p {partition}"]
    words += [] if slurm.account is None else [f"-A {slurm.account}"]
    words += ["-n 1", f"--cpus-per-task={workers.threads * per_job}"]
    words += [f"--mem={in_whole_units(workers.memory_gib * per_job)}"] if workers.memory_gib else []
    words += [] if limit is None else [f"-t {-(-limit // 60)}"]  # minutes
    words += [*slurm.directives, *(settings.directives if settings else [])]
    if workers.gpus:
        words.append(slurm.gpu_option.format(gpus=workers.gpus * per_job))
    return words


def in_whole_units(gib: float) -> str:
    """GiB, or MiB where it is less than one, rounded up: Slurm takes no fractions."""
    return f"{math.ceil(gib)}G" if gib >= 1 else f"{math.ceil(gib * 1024)}M"


def worker_command(
    config: ClusterConfig,
    prefix: str,
    pool: str,
    scheduler: str,
    certificates: Certificates | None,
) -> list[str]:
    """The words, quoted for the shell, that start a job's worker, or its workers."""
    workers, per_job = config.pools[pool], config.slurm.workers_per_job(pool)
    first, module = "$SLURM_ARRAY_TASK_ID", ["engines.clusters.worker"]
    if per_job > 1:
        first = f"$((SLURM_ARRAY_TASK_ID * {per_job}))"
        logs = str(log_folder(config, prefix))
        module = [
            "engines.clusters.job_workers",
            shlex.quote(logs),
            str(per_job),
            str(workers.gpus),
        ]
    words = ["exec", config.slurm.python or sys.executable, "-P", "-m", *module, scheduler]
    words += ["--name", f"{pool}-{first}", "--local-directory", '"${TMPDIR:-/tmp}"']
    return [*words, *map(shlex.quote, worker_options(pool, workers.slots, certificates))]


def log_folder(config: ClusterConfig, prefix: str) -> Path:
    """Of the scripts and the workers' logs."""
    return Path(config.slurm.folder).absolute() / prefix


def start(
    config: ClusterConfig, env: Environments, certificates: Certificates | None
) -> StartedCluster:
    """The scheduler in a node process here, and a job array for each pool."""
    _check_programs()
    prefix = config.slurm.name or f"refrain-{uuid.uuid4().hex[:8]}"
    folder = log_folder(config, prefix)
    folder.mkdir(parents=True, exist_ok=True)
    node = NodeProcess(
        NodePlan(
            no_workers_timeout=config.no_workers_timeout,
            workers=(),
            host=listening_address(config.host),
            certificates=certificates,
            dashboard=config.dashboard,
            at_end=tuple(("scancel", "--name", f"{prefix}-{pool}") for pool in config.pools),
        ),
        config.start_timeout,
    )
    arrays = JobArrays(config, prefix, folder)
    try:
        arrays.submit_all(env, node.address, certificates)
    except BaseException:
        arrays.close()
        node.end()
        raise
    return StartedCluster(address=node.address, node=node, remote=arrays, logs=folder)


def _check_programs() -> None:
    missing = [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]
    if missing:
        raise ValueError(
            f"cluster.kind = slurm, but {', '.join(missing)} is not on this machine's PATH. Start "
            "the run on a node from which jobs can be submitted."
        )


def check(config: ClusterConfig) -> None:
    """ValueError with what Slurm has against a pool's jobs."""
    _check_programs()
    address = "tcp://127.0.0.1:1"  # Slurm does not look at it
    for pool, text in job_scripts(config, "refrain-check", {}, address, None).items():
        try:
            slurm_says("sbatch", "--test-only", stdin=text)
        except ValueError as error:
            raise ValueError(f"Jobs of cluster.pools.{pool}: {error}") from None


class JobArrays(RemoteWorkers):
    """The job arrays of all pools.

    Task N of the array PREFIX-POOL is worker POOL-N; with k workers in a job, workers POOL-(k N) to
    POOL-(k N + k - 1), which are replaced together. A replacement gets a new number.
    """

    def __init__(self, config: ClusterConfig, prefix: str, folder: Path) -> None:
        self.config = config
        self.prefix = prefix
        self.folder = folder
        self._next = dict.fromkeys(config.pools, 0)  # number of the pool's next job
        self._deaths = dict.fromkeys(config.pools, 0)  # of jobs in a row, before joining
        # Numbers of jobs that were submitted, and have not joined yet.
        self._expected: dict[str, set[int]] = {pool: set() for pool in config.pools}
        self._leaving: frozenset[str] = frozenset()
        self._idle: dict[str, float] = {}  # id of a replaced job -> since when it has been idle
        self._failure: str | None = None
        self._certificates: Certificates | None = None  # as files
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def submit_all(
        self, env: Environments, scheduler: str, certificates: Certificates | None
    ) -> None:
        """Write each pool's script, and submit the tasks for its workers."""
        if certificates is not None:
            self._certificates = certificates.as_files(self.folder / "tls")
        scripts = job_scripts(self.config, self.prefix, env, scheduler, self._certificates)
        for pool, text in scripts.items():
            self._script(pool).write_text(text)
            self._submit(pool, self._jobs(pool))

    def _job_name(self, pool: str) -> str:
        return f"{self.prefix}-{pool}"

    def _script(self, pool: str) -> Path:
        return self.folder / f"{pool}.sh"

    def _jobs(self, pool: str) -> int:
        """Jobs that a pool's workers are in."""
        return self.config.pools[pool].workers // self.config.slurm.workers_per_job(pool)

    def _workers(self, pool: str, job: int) -> frozenset[str]:
        """Names of the workers in the job of a number."""
        per_job = self.config.slurm.workers_per_job(pool)
        return frozenset(f"{pool}-{job * per_job + n}" for n in range(per_job))

    def _submit(self, pool: str, count: int) -> None:
        first = self._next[pool]
        self._next[pool] += count
        self._expected[pool] |= set(range(first, first + count))
        alone = self.config.slurm.workers_per_job(pool) == 1
        log_name = f"{pool}-%a.log" if alone else f"{pool}.job-%a.log"  # beside the workers' own
        slurm_says(
            "sbatch",
            "--parsable",
            f"--array={first}-{first + count - 1}",
            f"--output={self.folder / log_name}",
            "--open-mode=append",
            str(self._script(pool)),
        )

    # -- RemoteWorkers -------------------------------------------------------------------------------

    def leaving(self) -> frozenset[str]:
        """Workers of jobs whose time limit is near, and which have been replaced."""
        return self._leaving

    def failure(self) -> str | None:
        """Why no more jobs are submitted."""
        return self._failure

    def certificate_files(self) -> Certificates | None:
        """In the folder that jobs and this machine share."""
        return self._certificates

    def watch(self, cluster: Cluster) -> None:
        """Look at the queue from time to time, in a thread, until `close`."""

        def look() -> None:
            while not self._over.wait(LOOK_EVERY):
                try:
                    self._tend(cluster)
                except (subprocess.TimeoutExpired, TimeoutError, BusySlurm):
                    continue  # Slurm's controller or our scheduler is busy: look again later
                except ValueError as error:  # a limit on jobs, say: the next look tries again
                    log.warning("No replacement of a Slurm job: %s", error)
                except ClusterLost as error:
                    self._failure = str(error)
                    return

        self._thread = threading.Thread(target=look, name="slurm-jobs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cancel every job; returns when the queue has none of them."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        until = time.monotonic() + END_TIMEOUT
        with contextlib.suppress(subprocess.TimeoutExpired, BusySlurm, ValueError):
            for pool in self.config.pools:
                slurm_says("scancel", "--quiet", "--name", self._job_name(pool))
            while self._tasks(ending=True) and time.monotonic() < until:
                time.sleep(0.5)
        shutil.rmtree(self.folder / "tls", ignore_errors=True)

    # -- keeping the pools at their size -----------------------------------------------------------

    def _tasks(self, ending: bool = False) -> dict[str, list[Task]]:
        """Pool -> its tasks in the queue; pools without any are missing."""
        names = {self._job_name(pool): pool for pool in self.config.pools}
        tasks: dict[str, list[Task]] = {}
        for task in listed(list(names), ending):
            tasks.setdefault(names[task.job_name], []).append(task)
        return tasks

    def _tend(self, cluster: Cluster) -> None:
        """Replace jobs that ended or will end soon; cancel those that have been replaced."""
        queued = self._tasks()
        leaving: set[str] = set()
        for pool in self.config.pools:
            jobs = {task.number: task for task in queued.get(pool, []) if task.number is not None}
            members = cluster.members(pool).keys()
            self._count_deaths(pool, jobs.keys(), members)
            soon = [number for number, task in jobs.items() if self._nears_its_end(task)]
            lacking = self._jobs(pool) - len(jobs.keys() - soon)
            if lacking > 0:
                self._submit(pool, lacking)
            # A job leaves when another one has joined with all its workers: ranks on a node stay
            # within one, and a gang is formed anew once.
            joined = sum(self._workers(pool, number) <= members for number in jobs.keys() - soon)
            soon.sort(key=lambda number: jobs[number].left or 0.0)
            for n, number in enumerate(soon):
                if n < len(soon) + joined - self._jobs(pool):
                    leaving |= self._workers(pool, number)
                    self._let_go(cluster, jobs[number], self._workers(pool, number))
                else:
                    self._idle.pop(jobs[number].id, None)
        self._leaving = frozenset(leaving)

    def _nears_its_end(self, task: Task) -> bool:
        return task.left is not None and task.left <= self.config.slurm.handover

    def _count_deaths(self, pool: str, queued: Set[int], members: Set[str]) -> None:
        """Give the pool up when its jobs end one after the other without ever joining."""
        expected = self._expected[pool]
        joined = {number for number in expected if self._workers(pool, number) <= members}
        ended = expected - queued - joined
        self._expected[pool] = expected - ended - joined
        if joined:
            self._deaths[pool] = 0
        self._deaths[pool] += len(ended)
        if self._deaths[pool] >= QUICK_DEATHS * self._jobs(pool):
            raise ClusterLost(
                f"{self._deaths[pool]} Slurm jobs of pool {pool!r} ended before their workers had "
                f"joined. Look at the logs in {self.folder}; the run can be resumed."
            )

    def _let_go(self, cluster: Cluster, task: Task, workers: Set[str]) -> None:
        """Cancel a replaced job once its live workers have finished their calls."""
        live = [member for name, member in cluster.members().items() if name in workers]
        if any(status_of(cluster, member.address).running for member in live):
            self._idle.pop(task.id, None)
            return
        since = self._idle.setdefault(task.id, time.monotonic())
        if time.monotonic() - since >= IDLE:
            slurm_says("scancel", task.id)
