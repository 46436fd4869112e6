"""The batch scripts of the pools' job arrays, made by dask-jobqueue in a process of its own.

dask-jobqueue 0.9.0 sets a handler for Ctrl-C when it is imported, which would replace the flow's and
works in a main thread only (https://github.com/dask/dask-jobqueue/issues/696; mended after 0.9.0).
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import warnings

from pydantic import BaseModel, ConfigDict

from configs.cluster.cluster import ClusterConfig
from engines.processes.certificates import Certificates
from engines.processes.process_setup import C_LIBRARIES

DEATH_TIMEOUT = 60  # seconds that a worker looks for the scheduler
TIMEOUT = 60.0  # seconds for making the scripts


class Wanted(BaseModel):
    """What the scripts are made from."""

    model_config = ConfigDict(frozen=True)

    config: ClusterConfig
    environment: dict[str, dict[str, str]]  # variables of the workers, by pool
    scheduler: str  # its address
    certificates: Certificates | None  # paths
    job_names: dict[str, str]  # by pool
    python_path: str  # folders that modules are imported from
    logs: str  # folder of the workers' logs


def job_scripts(wanted: Wanted) -> dict[str, str]:
    """Pool -> script."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "engines.clusters.job_scripts"],
        input=wanted.model_dump_json(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"dask-jobqueue made no job scripts: {done.stderr[-1000:]}")
    scripts: dict[str, str] = json.loads(done.stdout)
    return scripts


def job_script(asked: Wanted, pool: str) -> str:
    """The batch script of a pool's array, as dask-jobqueue makes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its YAML defaults use names that it calls deprecated
        from dask_jobqueue.slurm import SLURMJob

        wanted, slurm = asked.config.pools[pool], asked.config.slurm
        own = slurm.pools.get(pool)
        limit = (own and own.time_limit) or slurm.time_limit
        per_job = slurm.workers_per_job(pool)
        directives = [*slurm.directives, *(own.directives if own else [])]
        if wanted.gpus:
            directives.append(slurm.gpu_option.format(gpus=wanted.gpus * per_job))
        first, command = "$SLURM_ARRAY_TASK_ID", "engines.clusters.worker"
        if per_job > 1:
            first = f"$((SLURM_ARRAY_TASK_ID * {per_job}))"
            command = (
                f"engines.clusters.job_workers {shlex.quote(asked.logs)} {per_job} {wanted.gpus}"
            )
        # One task, and so one node, whatever starts processes in it.
        job = SLURMJob(
            scheduler=asked.scheduler,
            name=f"{pool}-{first}",
            queue=(own and own.partition) or slurm.partition,
            account=slurm.account,
            walltime=None if limit is None else str(-(-limit // 60)),  # minutes
            cores=wanted.threads * per_job,
            memory=f"{(wanted.memory_gib or 1) * per_job}GiB",
            processes=1,
            job_name=asked.job_names[pool],
            job_extra_directives=directives,
            job_directives_skip=[] if wanted.memory_gib else ["--mem"],
            job_script_prologue=[
                *slurm.prologue,
                *(f"export {name}={shlex.quote(x)}" for name, x in variables(asked, pool).items()),
            ],
            python=f"exec {slurm.python or sys.executable} -P",
            worker_command=command,
            worker_extra_args=worker_options(asked, pool),
            death_timeout=DEATH_TIMEOUT,
            log_directory=None,
            local_directory='"${TMPDIR:-/tmp}"',
        )
        if limit is None:
            job.job_header = "\n".join(
                line for line in job.job_header.splitlines() if not line.startswith("#SBATCH -t")
            )
        return str(job.job_script())


def variables(asked: Wanted, pool: str) -> dict[str, str]:
    """Environment variables of a pool's workers."""
    wanted = asked.config.pools[pool]
    threads = str(wanted.threads)
    return {
        **({"PYTHONPATH": asked.python_path} if asked.config.slurm.python is None else {}),
        **C_LIBRARIES,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        **asked.environment[pool],
        **({} if wanted.gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    }


def worker_options(asked: Wanted, pool: str) -> list[object]:
    """Options of `dask worker`, after those that dask-jobqueue gives.

    Of a repeated option the last one counts: dask-jobqueue's own --nthreads follows the cores.
    """
    slots, certificates = asked.config.pools[pool].slots, asked.certificates
    options = ["--nthreads", slots + 1, "--resources", f"'{pool}={slots}'"]
    if certificates is not None:
        options += ["--protocol", "tls", "--tls-ca-file", certificates.ca]
        options += ["--tls-cert", certificates.cert, "--tls-key", certificates.key]
    return options


def main() -> None:
    """Settings from standard input, scripts to standard output, as JSON."""
    wanted = Wanted.model_validate_json(sys.stdin.read())
    print(json.dumps({pool: job_script(wanted, pool) for pool in wanted.config.pools}))


if __name__ == "__main__":
    main()
