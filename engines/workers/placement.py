"""Which worker sits where, and at which port: the check that a plan fits the nodes, each of them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from configs.cluster import PoolConfig
from configs.environment import visible_gpus

PORTS = range(20_000, 32_768)  # below those that Linux gives to connections


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeResources:
    """What one machine offers."""

    name: str
    cores: int
    gpus: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them
    uuids: tuple[str, ...] = ()  # of the same GPUs; empty where they are not known

    @property
    def devices(self) -> tuple[str, ...]:
        """What tells a GPU of this machine from the others, whoever names them.

        A process that may see one device of eight, as in a Slurm job, calls it 0 whichever it is.
        """
        return self.uuids or self.gpus


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedWorker:
    """Where one worker runs."""

    name: str  # of the worker: POOL-NUMBER
    pool: str
    node: str
    gpus: tuple[str, ...]
    threads: int

    @property
    def env(self) -> dict[str, str]:
        """Variables that keep the worker within what it was given."""
        threads = str(self.threads)
        # torch takes its number of threads from MKL's where that is set.
        return {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus),
        }


def this_node() -> NodeResources:
    """What this machine offers, found without torch."""
    visible = visible_gpus()
    listed = {} if visible == () else _listed_gpus()
    gpus = tuple(listed) if visible is None else visible
    # A name that is no index is a UUID already, or its beginning.
    uuids = tuple(listed.get(gpu, "") if gpu.isdigit() else gpu for gpu in gpus)
    return NodeResources(
        name=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        gpus=gpus,
        uuids=uuids if all(uuids) else (),
    )


def _listed_gpus() -> dict[str, str]:
    """UUID by index of the GPUs that this process may see; empty without a driver or devices."""
    if shutil.which("nvidia-smi") is None:
        return {}
    listing = subprocess.run(
        ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if listing.returncode != 0:  # a driver without devices
        return {}
    lines = (line.partition(",") for line in listing.stdout.splitlines() if line.strip())
    return {index.strip(): uuid.strip() for index, _, uuid in lines}


def place_local(pools: Mapping[str, PoolConfig]) -> tuple[PlacedWorker, ...]:
    """Places for all workers on this machine; ValueError when they do not fit."""
    return place(pools, [this_node()])


def place(
    pools: Mapping[str, PoolConfig], nodes: Sequence[NodeResources]
) -> tuple[PlacedWorker, ...]:
    """Places for all workers, pool by pool; ValueError, in one sentence, when they do not fit.

    A GPU has one worker; a worker's GPUs are of one node. Threads are checked worker by worker and
    pool by pool, since pools may take turns on the cores.
    """
    free = {node.name: list(node.gpus) for node in nodes}
    used: dict[tuple[str, str], int] = {}  # threads by (node, pool)
    placed: dict[str, list[PlacedWorker]] = {pool: [] for pool in pools}
    for pool, config in sorted(pools.items(), key=lambda item: -item[1].gpus):
        for number in range(config.workers):
            node = _choose(pool, config, nodes, free, used)
            used[node.name, pool] = used.get((node.name, pool), 0) + config.threads
            gpus = tuple(free[node.name][: config.gpus])
            del free[node.name][: config.gpus]
            placed[pool].append(
                PlacedWorker(
                    name=f"{pool}-{number}",
                    pool=pool,
                    node=node.name,
                    gpus=gpus,
                    threads=config.threads,
                )
            )
    return tuple(worker for pool in pools for worker in placed[pool])


def _choose(
    pool: str,
    config: PoolConfig,
    nodes: Sequence[NodeResources],
    free: Mapping[str, Sequence[str]],
    used: Mapping[tuple[str, str], int],
) -> NodeResources:
    """The node for the next worker of a pool: of those that fit, the one with the most room."""
    key = f"cluster.pools.{pool}"
    most = max(node.cores for node in nodes)
    if config.threads > most:
        raise ValueError(
            f"{key}.threads = {config.threads}, but no node has more than {most} cores. "
            f"Set it to at most {most}."
        )
    roomy = [node for node in nodes if len(free[node.name]) >= config.gpus]
    if not roomy:
        has = ", ".join(f"{node.name} has {len(node.gpus)}" for node in nodes)
        raise ValueError(
            f"{key} wants {config.workers} workers with {config.gpus} GPUs each, and a node with "
            f"that many free is missing ({has}, shared by all pools). Lower {key}.workers or "
            f"{key}.gpus, or let roles share a pool (cluster.roles)."
        )
    # A pool's workers compute at the same time; one thread each is always allowed.
    fitting = [
        node
        for node in roomy
        if config.threads == 1 or used.get((node.name, pool), 0) + config.threads <= node.cores
    ]
    if not fitting:
        raise ValueError(
            f"{key} wants {config.workers} workers with {config.threads} threads each, which the "
            f"nodes' cores ({', '.join(f'{node.name}: {node.cores}' for node in nodes)}) cannot "
            f"run at once. Lower {key}.threads or {key}.workers."
        )
    return max(fitting, key=lambda node: (len(free[node.name]), -used.get((node.name, pool), 0)))


def check_placed(
    pools: Mapping[str, PoolConfig], placed: Mapping[str, tuple[str, NodeResources]]
) -> None:
    """Check workers that others started; ValueError, in one sentence, for what does not fit.

    `placed`: pool and machine of each worker by name; the machine's GPUs are those that the worker
    may use.
    """
    owners: dict[tuple[str, str], str] = {}
    for name, (pool, node) in placed.items():
        config = pools[pool]
        if len(node.gpus) < config.gpus:
            raise ValueError(
                f"cluster.pools.{pool}.gpus = {config.gpus}, but worker {name} on {node.name} may "
                f"use {len(node.gpus)}. Start it with {config.gpus} in CUDA_VISIBLE_DEVICES."
            )
        if config.threads > node.cores:
            raise ValueError(
                f"cluster.pools.{pool}.threads = {config.threads}, but worker {name} on "
                f"{node.name} has {node.cores} cores. Set it to at most {node.cores}."
            )
        for gpu in node.devices if config.gpus else ():
            owner = owners.setdefault((node.name, gpu), name)
            if owner != name:
                raise ValueError(
                    f"Workers {owner} and {name} on {node.name} share GPU {gpu}. "
                    "Start each with a CUDA_VISIBLE_DEVICES of its own."
                )


def find_free_port(host: str) -> int:
    """One that no connection takes before it is listened at, if there is such a one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (*random.SystemRandom().sample(PORTS, 64), 0):  # 0: any that is free
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise OSError(f"no TCP port of {host} is free")
