"""Workers that a person starts on a machine, for runs that join their scheduler (kind = address).

They stay, whatever comes: one that ends is started again, after a longer wait each time while that
happens at once, and while the scheduler is away they wait for it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from configs.cluster import ClusterConfig, PoolConfig
from engines.clusters.job_workers import (
    LOOK_EVERY,
    JobWorker,
    answers,
    await_ends,
    end_all,
    ended_of,
    heard_signals,
    shares,
    worker_options,
    worker_variables,
)
from engines.processes.dask_settings import certificates_for
from engines.processes.node import python_path
from engines.processes.parent_death import adopt_orphans
from engines.workers.placement import NodeResources, this_node

FIRST_WAIT = 1.0  # seconds until a worker that ended is started again
LONGEST_WAIT = 60.0  # seconds; each wait is twice the one before, while it ends at once
ASK_EVERY = 2.0  # seconds between looks whether the scheduler is there

Tell = Callable[[str], None]  # says a sentence to who started the workers


def check_machine(config: ClusterConfig, pool: str, count: int) -> None:
    """ValueError, in one sentence, where so many workers of a pool cannot be on this machine."""
    check_fits(pool, config.pools[pool], count, this_node())
    certificates_for(config.encryption)


def check_fits(pool: str, config: PoolConfig, count: int, node: NodeResources) -> None:
    """ValueError, in one sentence, where so many workers of a pool do not fit this machine."""
    if len(node.gpus) < count * config.gpus:
        raise ValueError(
            f"{count} workers with cluster.pools.{pool}.gpus = {config.gpus} need "
            f"{count * config.gpus} GPUs, and {node.name} lets this process use {len(node.gpus)}. "
            "Give a smaller number by --workers, or see to CUDA_VISIBLE_DEVICES."
        )
    if config.threads > node.cores:
        raise ValueError(
            f"cluster.pools.{pool}.threads = {config.threads}, but {node.name} has {node.cores} "
            f"cores. Set it to at most {node.cores}."
        )


def serve(config: ClusterConfig, pool: str, names: Sequence[str], logs: Path, tell: Tell) -> None:
    """Hold workers of these names until Ctrl-C or SIGTERM, on a machine that was checked for them.

    `config`: of the runs that join, with the scheduler's address; `logs`: folder of a file for each.
    """
    assert config.address is not None
    pool_config, node = config.pools[pool], this_node()
    certificates = certificates_for(config.encryption)
    options = [config.address, *worker_options(pool, pool_config.slots, certificates)]
    variables = worker_variables(pool_config, pool_config.env) | {"PYTHONPATH": python_path()}
    logs.mkdir(parents=True, exist_ok=True, mode=0o700)
    signals = heard_signals(signal.SIGTERM, signal.SIGINT)
    adopt_orphans()
    try:
        gpus = shares(node.gpus, len(names), pool_config.gpus)
        workers = [
            JobWorker(
                name,
                options,
                variables | {"CUDA_VISIBLE_DEVICES": devices},
                logs / f"{name}.log",
            )
            for name, devices in zip(names, gpus, strict=True)
        ]
        keep(workers, config.address, signals, tell)
        _let_end(workers)
    finally:
        end_all()


def keep(workers: Sequence[JobWorker], scheduler: str, signals: Sequence[int], tell: Tell) -> None:
    """Start workers again that end, once the scheduler is there, until a signal to end comes in."""
    due: dict[str, float] = {}  # of each worker that has ended: when it is started again
    away, ask = False, 0.0
    while not signals:
        time.sleep(LOOK_EVERY)
        ended = ended_of(workers)
        for worker in ended:
            if worker.name not in due:
                wait = min(FIRST_WAIT * 2 ** worker.count_death(), LONGEST_WAIT)
                due[worker.name] = time.monotonic() + wait
                what = f"it is started again in {wait:g} s."
                worker.note(what)
                tell(f"Worker {worker.name} ended (status {worker.process.returncode}): {what}")
        ready = [worker for worker in ended if time.monotonic() >= due[worker.name]]
        if not ready or time.monotonic() < ask:
            continue
        ask = time.monotonic() + ASK_EVERY
        there = answers(scheduler)
        if there == away:
            away = not there
            state = "answers again" if there else "does not answer, and workers wait for it"
            tell(f"The scheduler at {scheduler} {state}.")
        for worker in ready if there else ():
            del due[worker.name]
            worker.start()


def _let_end(workers: Sequence[JobWorker]) -> None:
    """Have workers say goodbye to the scheduler."""
    for worker in workers:
        if not worker.ended():
            os.kill(worker.process.pid, signal.SIGTERM)
    await_ends(workers)
