"""Workers as Slurm jobs: a job array for each pool, kept at its size until the cluster closes.

The scheduler runs in this machine's node process, which cancels the jobs too should the flow
process be killed. A job that nears its time limit is replaced by a new task of its pool's array;
engines/workers/cluster.py gives a leaving worker no calls once others have joined.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from configs.cluster.cluster import ClusterConfig
from engines.clusters.job_scripts import Wanted, job_scripts
from engines.clusters.opening import Environments, Started, listening_address
from engines.clusters.slurm_jobs import BusySlurm, Task, listed, slurm_says
from engines.failures import ClusterLost
from engines.processes.certificates import Certificates
from engines.processes.node import NodePlan
from engines.processes.node_process import NodeProcess, python_path
from engines.workers.calls import status_of
from engines.workers.cluster import Cluster

log = logging.getLogger(__name__)

LOOK_EVERY = 5.0  # seconds between looks at the queue
IDLE = 10.0  # seconds that a replaced worker is idle before its job is cancelled
END_TIMEOUT = 20.0  # seconds for cancelled jobs to leave the queue
QUICK_DEATHS = 3  # tasks of a pool that may end in a row before one of them joined


def start(config: ClusterConfig, env: Environments, certificates: Certificates | None) -> Started:
    """The scheduler in a node process here, and a job array for each pool."""
    _check_programs()
    prefix = config.slurm.name or f"refrain-{uuid.uuid4().hex[:8]}"
    folder = Path(config.slurm.folder).absolute() / prefix
    folder.mkdir(parents=True, exist_ok=True)
    node = NodeProcess(
        NodePlan(
            no_workers_timeout=config.no_workers_timeout,
            workers=(),
            host=listening_address(config.host),
            certificates=certificates,
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
    return Started(address=node.address, node=node, remote=arrays, logs=folder)


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
    scripts = job_scripts(wanted_scripts(config, "refrain-check", {}, address, None))
    for pool, text in scripts.items():
        try:
            slurm_says("sbatch", "--test-only", stdin=text)
        except ValueError as error:
            raise ValueError(f"Jobs of cluster.pools.{pool}: {error}") from None


def wanted_scripts(
    config: ClusterConfig,
    prefix: str,
    env: Environments,
    scheduler: str,
    certificates: Certificates | None,
) -> Wanted:
    """What the pools' scripts are made from."""
    return Wanted(
        config=config,
        environment={pool: dict(env.get(pool, {})) for pool in config.pools},
        scheduler=scheduler,
        certificates=certificates,
        job_names={pool: f"{prefix}-{pool}" for pool in config.pools},
        python_path=python_path(),
    )


class JobArrays:
    """The job arrays of all pools; the RemoteWorkers of a cluster on Slurm.

    Worker POOL-N is task N of an array named PREFIX-POOL. A replacement gets a new number.
    """

    def __init__(self, config: ClusterConfig, prefix: str, folder: Path) -> None:
        self.config = config
        self.prefix = prefix
        self.folder = folder
        self._next = dict.fromkeys(config.pools, 0)  # number of the pool's next worker
        self._deaths = dict.fromkeys(config.pools, 0)  # in a row, before joining
        self._known: dict[str, set[str]] = {pool: set() for pool in config.pools}  # submitted
        self._leaving: frozenset[str] = frozenset()
        self._idle: dict[str, float] = {}  # replaced worker -> since when it has been idle
        self._failure: str | None = None
        self._certificates: Certificates | None = None  # as files
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def submit_all(
        self, env: Environments, scheduler: str, certificates: Certificates | None
    ) -> None:
        """Write each pool's script, and submit as many tasks as it has workers."""
        if certificates is not None:
            self._certificates = certificates.as_files(self.folder / "tls")
        wanted = wanted_scripts(self.config, self.prefix, env, scheduler, self._certificates)
        for pool, text in job_scripts(wanted).items():
            self._script(pool).write_text(text)
            self._submit(pool, self.config.pools[pool].workers)

    def _job_name(self, pool: str) -> str:
        return f"{self.prefix}-{pool}"

    def _script(self, pool: str) -> Path:
        return self.folder / f"{pool}.sh"

    def _submit(self, pool: str, count: int) -> None:
        first = self._next[pool]
        self._next[pool] += count
        self._known[pool] |= {f"{pool}-{number}" for number in range(first, first + count)}
        slurm_says(
            "sbatch",
            "--parsable",
            f"--array={first}-{first + count - 1}",
            f"--output={self.folder / f'{pool}-%a.log'}",
            "--open-mode=append",
            str(self._script(pool)),
        )

    # -- RemoteWorkers -------------------------------------------------------------------------------

    def leaving(self) -> frozenset[str]:
        """Workers whose time limit is near."""
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
        found: dict[str, list[Task]] = {}
        for task in listed(list(names), ending):
            found.setdefault(names[task.job_name], []).append(task)
        return found

    def _tend(self, cluster: Cluster) -> None:
        """Replace tasks that ended or will end soon; cancel those that have been replaced."""
        queued = self._tasks()
        leaving: set[str] = set()
        for pool, wanted in self.config.pools.items():
            tasks = {f"{pool}-{task.number}": task for task in queued.get(pool, [])}
            members = cluster.members(pool)
            self._count_deaths(pool, tasks, members)
            soon = {name for name, task in tasks.items() if self._nears_its_end(pool, task)}
            leaving |= soon
            lacking = wanted.workers - len(tasks.keys() - soon)
            if lacking > 0:
                self._submit(pool, lacking)
            replaced = len(members.keys() - soon) >= wanted.workers
            for name in soon:
                self._let_go(cluster, tasks[name], name, replaced and name in members)
        self._leaving = frozenset(leaving)

    def _nears_its_end(self, pool: str, task: Task) -> bool:
        return task.left is not None and task.left <= self.config.slurm.handover

    def _count_deaths(
        self, pool: str, tasks: Mapping[str, Task], members: Mapping[str, object]
    ) -> None:
        """Give the pool up when its jobs end one after the other without ever joining."""
        ended = self._known[pool] - tasks.keys() - members.keys()
        joined = self._known[pool] & members.keys()
        self._known[pool] -= ended | joined
        if joined:
            self._deaths[pool] = 0
        self._deaths[pool] += len(ended)
        if self._deaths[pool] >= QUICK_DEATHS * self.config.pools[pool].workers:
            raise ClusterLost(
                f"{self._deaths[pool]} Slurm jobs of pool {pool!r} ended before a worker joined. "
                f"Look at the logs in {self.folder}; the run can be resumed."
            )

    def _let_go(self, cluster: Cluster, task: Task, name: str, replaced: bool) -> None:
        """Cancel a replaced worker's job once it has finished its calls."""
        member = cluster.members().get(name)
        if not replaced or member is None or status_of(cluster, member.address).running:
            self._idle.pop(name, None)
            return
        since = self._idle.setdefault(name, time.monotonic())
        if time.monotonic() - since >= IDLE:
            slurm_says("scancel", task.id)
