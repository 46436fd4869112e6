"""Open the cluster that the settings ask for, and wait for its workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from distributed import Client
from distributed.utils import get_ip_interface

from configs.cluster import ClusterConfig
from configs.imports import imported
from engines.failures import ClusterLost
from engines.processes.bounded import bounded
from engines.processes.dask_settings import Certificates, certificates_for
from engines.processes.node import NodePlan, NodeProcess, WorkerPlan
from engines.processes.process_setup import check_shared_memory
from engines.workers.cluster import (
    ASK_TIMEOUT,
    Cluster,
    ComesBack,
    RemoteWorkers,
    Say,
    TellsOfWorkers,
    allowed_failures,
)
from engines.workers.host import HOST, EngineHost, examine
from engines.workers.placement import check_placed, place_local, this_node

if TYPE_CHECKING:
    from tornado.ioloop import IOLoop, PeriodicCallback

Environments = Mapping[str, Mapping[str, str]]  # pool -> environment variables of its workers


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedCluster:
    """The processes of a cluster that we started."""

    address: str  # of the scheduler
    node: NodeProcess | None = None  # holds the scheduler, where that is one of our processes
    remote: RemoteWorkers | None = None  # workers elsewhere
    logs: Path | None = None  # folder of the workers' log files, one for each name


Start = Callable[[ClusterConfig, Environments, Certificates | None], StartedCluster]

# The module of each kind of cluster, loaded when needed. It has a function `start` of type Start;
# those of Slurm and SSH have a function `check` too.
KINDS = {
    "slurm": "engines.clusters.slurm",
    "ssh": "engines.clusters.ssh",
    "kubernetes": "engines.clusters.kubernetes",
}


def open_cluster(
    config: ClusterConfig,
    worker_env: Environments | None = None,
    cancel: threading.Event | None = None,
    preload: Sequence[str] = (),
    output: Path | None = None,
    say: Say | None = None,
) -> Cluster:
    """Start or join the cluster and wait until every pool has its workers.

    Use it as a context manager. `worker_env`: environment variables of the workers by pool; the
    pools' own `env` goes before it. `cancel` ends the wait. `preload`: modules that workers on this
    machine are forked with (NodePlan.preloaded says when). `output`: a file that gets what workers
    on this machine print, beside this process's standard error. `say`: told of waits for workers.
    Raises ValueError for a plan that cannot fit, NoWorkers when workers are missing after
    cluster.start_timeout.
    """
    env = {
        pool: {**(worker_env or {}).get(pool, {}), **workers.env}
        for pool, workers in config.pools.items()
    }
    certificates = certificates_for(config.encryption)
    plugin = EngineHost()
    if config.kind == "address":
        cluster = _join(config, certificates)
        plugin = EngineHost(env=env)
    elif config.kind == "local":
        cluster = _connected(
            config, certificates, _start_local(config, env, certificates, preload, output)
        )
    else:
        start: Start = imported(f"{KINDS[config.kind]}:start")
        cluster = _connected(config, certificates, start(config, env, certificates))
    if say is not None:
        cluster.outages.say = say
    try:
        cluster.ask(cluster.client.register_plugin, TellsOfWorkers(), name=TellsOfWorkers.name)
        cluster.ask(cluster.client.register_plugin, plugin, name=HOST)
        if config.kind == "address":  # of others nobody but their nanny starts them again
            cluster.ask(cluster.client.register_plugin, ComesBack(), name=ComesBack.name)
        for pool, workers in config.pools.items():
            cluster.wait(pool, workers.workers, config.start_timeout, cancel)
        if config.kind != "local":
            check_members(cluster)
    except BaseException:
        cluster.close()
        raise
    return cluster


def check_cluster(config: ClusterConfig) -> str:
    """What was looked at; ValueError, in one sentence, for a plan that cannot be carried out.

    Starts nothing.
    """
    plan = ", ".join(
        f"{pool} {pools.workers} x ({pools.threads} threads, {pools.gpus} GPUs)"
        for pool, pools in config.pools.items()
    )
    if config.kind == "local":
        check_shared_memory()
        place_local(config.pools)
        here = this_node()
        plan += f" on this machine's {here.cores} cores and {len(here.gpus)} GPUs"
    certificates_for(config.encryption)
    if config.kind in ("slurm", "ssh"):
        imported(f"{KINDS[config.kind]}:check")(config)
    return f"{config.kind}: {plan}"


def _start_local(
    config: ClusterConfig,
    env: Environments,
    certificates: Certificates | None,
    preload: Sequence[str],
    output: Path | None,
) -> StartedCluster:
    """Start scheduler and workers on this machine."""
    check_shared_memory()
    plan = NodePlan(
        no_workers_timeout=config.no_workers_timeout,
        workers=tuple(
            WorkerPlan(
                name=placed.name,
                pool=placed.pool,
                slots=config.pools[placed.pool].slots,
                env={**placed.env, **env[placed.pool]},
            )
            for placed in place_local(config.pools)
        ),
        certificates=certificates,
        dashboard=config.dashboard,
        preload=tuple(preload),
    )
    node = NodeProcess(plan, config.start_timeout, output=output)
    return StartedCluster(address=node.address, node=node)


def _connected(
    config: ClusterConfig, certificates: Certificates | None, started: StartedCluster
) -> Cluster:
    """Connect to the scheduler of a cluster that we started."""
    try:
        client = _connect(started.address, certificates, config)
        cluster = Cluster(config, client, started.node, started.logs, started.remote)
    except BaseException as error:
        if started.remote is not None:
            started.remote.close()
        if started.node is not None:
            started.node.end()
        if isinstance(error, OSError | TimeoutError):
            raise ClusterLost(
                f"the Dask scheduler at {started.address} cannot be reached: {error}. "
                "The run can be resumed."
            ) from error
        raise
    if started.remote is not None:
        started.remote.watch(cluster)
    return cluster


def _join(config: ClusterConfig, certificates: Certificates | None) -> Cluster:
    """Join a running cluster, if its scheduler keeps our promises."""
    assert config.address is not None
    try:
        client = _connect(config.address, certificates, config)
    except (OSError, TimeoutError) as error:
        raise ValueError(
            f"cluster.address = {config.address} does not answer ({error}). Start the Dask "
            "scheduler there, or set cluster.kind = local and cluster.address = null."
        ) from error
    cluster = Cluster(config, client)
    try:
        check_scheduler(cluster)
    except BaseException:
        cluster.close()
        raise
    return cluster


def _connect(address: str, certificates: Certificates | None, config: ClusterConfig) -> Client:
    """A client of a scheduler that listens; OSError where it does not answer in time."""
    security = certificates.security() if certificates is not None else None
    timeout = min(config.start_timeout, ASK_TIMEOUT)

    def connect() -> Client:  # Dask's timeout is that of each of many things
        return Client(
            address, timeout=timeout, set_as_default=False, name="refrain", security=security
        )

    client = bounded(connect, timeout, "dask-client")
    stop_timers(client)
    return client


def stop_timers(client: Client) -> None:
    """Have Dask's client say nothing by itself.

    Every few seconds it asks what the scheduler is, for its own display, and says that it lives,
    which the scheduler only notes. There is no setting: the scheduler sets both intervals.
    """
    timers: Mapping[str, PeriodicCallback] = vars(client).get("_periodic_callbacks", {})
    for timer in timers.values():
        cast("IOLoop", client.loop).add_callback(timer.stop)


def listening_address(host: str | None) -> str:
    """The address of a network interface of this machine, or the address itself."""
    assert host is not None
    try:
        return str(get_ip_interface(host))
    except ValueError:  # no interface of that name
        return host


def check_scheduler(cluster: Cluster) -> None:
    """Refuse a scheduler that runs a dead worker's calls again."""
    allowed = cluster.ask(cluster.client.run_on_scheduler, allowed_failures)
    if allowed:
        raise ValueError(
            f"The scheduler at {cluster.config.address} re-runs a dead worker's calls "
            f"(allowed-failures = {allowed}), so an update could be applied twice. Start it with "
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=0."
        )


def check_members(cluster: Cluster) -> None:
    """Refuse workers that others started otherwise than the plan needs them."""
    members = cluster.members()
    answers = cluster.ask(
        cluster.client.run, examine, workers=[member.address for member in members.values()]
    )
    for member in members.values():
        info = answers[member.address]
        where = f"Worker {member.name} at {member.address}"
        if not info.nanny:
            raise ValueError(
                f"{where} has no nanny, so nobody would start it again. Start it without --no-nanny."
            )
        if info.daemonic:
            raise ValueError(
                f"{where} may not start processes, which vLLM does. "
                "Start it with DASK_DISTRIBUTED__WORKER__DAEMON=False."
            )
    check_placed(
        cluster.config.pools,
        {member.name: (member.pool, answers[member.address].node) for member in members.values()},
    )
