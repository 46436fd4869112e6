"""The batch scripts of the pools' job arrays."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from configs.cluster import ClusterConfig, PoolConfig
from engines.processes.certificates import Certificates
from engines.processes.process_setup import C_LIBRARIES

DEATH_TIMEOUT = 60  # seconds that a worker looks for the scheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the scripts are made from."""

    config: ClusterConfig
    environment: Mapping[str, Mapping[str, str]]  # variables of the workers, by pool
    scheduler: str  # its address
    certificates: Certificates | None  # paths
    job_names: Mapping[str, str]  # by pool
    python_path: str  # folders that modules are imported from
    logs: str  # folder of the workers' logs


def job_scripts(wanted: Wanted) -> dict[str, str]:
    """Pool -> script."""
    return {pool: job_script(wanted, pool) for pool in wanted.config.pools}


def job_script(asked: Wanted, pool: str) -> str:
    """The batch script of a pool's array, which becomes the worker."""
    exports = [f"export {name}={shlex.quote(x)}" for name, x in variables(asked, pool).items()]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "",
            *(f"#SBATCH {directive}" for directive in directives(asked, pool)),
            *filter(None, asked.config.slurm.prologue),
            *exports,
            " ".join(worker_command(asked, pool)),
            "",
        ]
    )


def directives(asked: Wanted, pool: str) -> list[str]:
    """What a job of a pool asks Slurm for, the settings' own directives last."""
    wanted, slurm = asked.config.pools[pool], asked.config.slurm
    own, per_job = slurm.pools.get(pool), slurm.workers_per_job(pool)
    partition = (own and own.partition) or slurm.partition
    limit = (own and own.time_limit) or slurm.time_limit
    # One task, and so one node, whatever starts processes in it.
    found = [f"-J {asked.job_names[pool]}"]
    found += [] if partition is None else [f"-p {partition}"]
    found += [] if slurm.account is None else [f"-A {slurm.account}"]
    found += ["-n 1", f"--cpus-per-task={wanted.threads * per_job}"]
    found += [f"--mem={in_whole_units(wanted.memory_gib * per_job)}"] if wanted.memory_gib else []
    found += [] if limit is None else [f"-t {-(-limit // 60)}"]  # minutes
    found += [*slurm.directives, *(own.directives if own else [])]
    if wanted.gpus:
        found.append(slurm.gpu_option.format(gpus=wanted.gpus * per_job))
    return found


def in_whole_units(gib: float) -> str:
    """GiB, or MiB where it is less than one, rounded up: Slurm takes no fractions."""
    return f"{math.ceil(gib)}G" if gib >= 1 else f"{math.ceil(gib * 1024)}M"


def worker_command(asked: Wanted, pool: str) -> list[str]:
    """The words, quoted for the shell, that start a job's worker, or its workers."""
    wanted, slurm, certificates = asked.config.pools[pool], asked.config.slurm, asked.certificates
    per_job = slurm.workers_per_job(pool)
    first, module = "$SLURM_ARRAY_TASK_ID", ["engines.clusters.worker"]
    if per_job > 1:
        first = f"$((SLURM_ARRAY_TASK_ID * {per_job}))"
        module = ["engines.clusters.job_workers", shlex.quote(asked.logs)]
        module += [str(per_job), str(wanted.gpus)]
    words = ["exec", slurm.python or sys.executable, "-P", "-m", *module, asked.scheduler]
    words += ["--name", f"{pool}-{first}", "--local-directory", '"${TMPDIR:-/tmp}"']
    return [*words, *map(shlex.quote, worker_options(pool, wanted.slots, certificates))]


def worker_options(pool: str, slots: int, certificates: Certificates | None) -> list[str]:
    """Options of engines.clusters.worker for a pool's workers, in a job or not."""
    words = ["--death-timeout", str(DEATH_TIMEOUT)]
    words += ["--nthreads", str(slots + 1), "--resources", f"{pool}={slots}"]
    if certificates is not None:
        words += ["--protocol", "tls", "--tls-ca-file", certificates.ca]
        words += ["--tls-cert", certificates.cert, "--tls-key", certificates.key]
    return words


def variables(asked: Wanted, pool: str) -> dict[str, str]:
    """Environment variables of a pool's workers."""
    wanted = asked.config.pools[pool]
    return {
        **({"PYTHONPATH": asked.python_path} if asked.config.slurm.python is None else {}),
        **worker_variables(wanted, asked.environment[pool]),
    }


def worker_variables(wanted: PoolConfig, own: Mapping[str, str]) -> dict[str, str]:
    """Those of a pool's workers, in a job or not; `own`: what the pool's engines and settings add."""
    threads = str(wanted.threads)
    return {
        **C_LIBRARIES,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        **own,
        **({} if wanted.gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    }
