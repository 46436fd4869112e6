"""Workers that a person starts on a machine, for runs that join their scheduler (kind = address).

They stay, whatever comes: one that ends is started again, after a longer wait each time while that
happens at once, and while the scheduler is away they wait for it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

from configs.cluster import ClusterConfig, PoolConfig
from engines.clusters.job_scripts import worker_options, worker_variables
from engines.clusters.job_workers import (
    GRACE,
    LOOK_EVERY,
    JobWorker,
    answers,
    end_all,
    kill_orphans,
    shares,
)
from engines.processes.certificates import certificates_for
from engines.processes.node_process import python_path
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


def check_fits(pool: str, wanted: PoolConfig, count: int, node: NodeResources) -> None:
    """ValueError, in one sentence, where so many workers of a pool do not fit this machine."""
    if len(node.gpus) < count * wanted.gpus:
        raise ValueError(
            f"{count} workers with cluster.pools.{pool}.gpus = {wanted.gpus} need "
            f"{count * wanted.gpus} GPUs, and {node.name} lets this process use {len(node.gpus)}. "
            "Give a smaller number by --workers, or see to CUDA_VISIBLE_DEVICES."
        )
    if wanted.threads > node.cores:
        raise ValueError(
            f"cluster.pools.{pool}.threads = {wanted.threads}, but {node.name} has {node.cores} "
            f"cores. Set it to at most {node.cores}."
        )


def serve(config: ClusterConfig, pool: str, names: Sequence[str], logs: Path, tell: Tell) -> None:
    """Hold workers of these names until Ctrl-C or SIGTERM, on a machine that was checked for them.

    `config`: of the runs that join, with the scheduler's address; `logs`: folder of a file for each.
    """
    assert config.address is not None
    wanted, node = config.pools[pool], this_node()
    certificates = certificates_for(config.encryption)
    options = [config.address, *worker_options(pool, wanted.slots, certificates)]
    variables = worker_variables(wanted, wanted.env) | {"PYTHONPATH": python_path()}
    logs.mkdir(parents=True, exist_ok=True, mode=0o700)
    told: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        told.append(signum)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    adopt_orphans()
    try:
        gpus = shares(node.gpus, len(names), wanted.gpus)
        workers = [
            JobWorker(
                name,
                options,
                variables | {"CUDA_VISIBLE_DEVICES": own},
                logs / f"{name}.log",
            )
            for name, own in zip(names, gpus, strict=True)
        ]
        keep(workers, config.address, told, tell)
        _let_end(workers)
    finally:
        end_all()


def keep(workers: Sequence[JobWorker], scheduler: str, told: Sequence[int], tell: Tell) -> None:
    """Start workers again that end, once the scheduler is there, until a signal to end comes in."""
    due: dict[str, float] = {}  # of each worker that has ended: when it is started again
    away, ask = False, 0.0
    while not told:
        time.sleep(LOOK_EVERY)
        ended = [one for one in workers if one.ended()]
        kill_orphans({one.process.pid for one in workers if one not in ended})
        for one in ended:
            if one.name not in due:
                wait = min(FIRST_WAIT * 2 ** one.count_death(), LONGEST_WAIT)
                due[one.name] = time.monotonic() + wait
                what = f"it is started again in {wait:g} s."
                one.note(what)
                tell(f"Worker {one.name} ended (status {one.process.returncode}): {what}")
        ready = [one for one in ended if time.monotonic() >= due[one.name]]
        if not ready or time.monotonic() < ask:
            continue
        ask = time.monotonic() + ASK_EVERY
        there = answers(scheduler)
        if there == away:
            away = not there
            state = "answers again" if there else "does not answer, and workers wait for it"
            tell(f"The scheduler at {scheduler} {state}.")
        for one in ready if there else ():
            del due[one.name]
            one.start()


def _let_end(workers: Iterable[JobWorker]) -> None:
    """Have workers say goodbye to the scheduler."""
    for one in workers:
        if not one.ended():
            os.kill(one.process.pid, signal.SIGTERM)
    until = time.monotonic() + GRACE
    while not all(one.ended() for one in workers) and time.monotonic() < until:
        time.sleep(0.1)
