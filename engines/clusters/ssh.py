"""Workers on machines that `ssh` reaches: a node process there for each, held by its connection.

Each machine runs engines/processes/node.py without a scheduler of its own. Its plan, credentials
included, goes through the encrypted connection and into no file; when the connection ends, however
it ends, the node process ends everything below it. A connection that breaks is made again.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from configs.cluster import ClusterConfig
from configs.environment import given
from engines.clusters.machine import versions
from engines.clusters.opening import Environments, StartedCluster, listening_address
from engines.failures import ClusterLost
from engines.processes.dask_settings import Certificates
from engines.processes.node import NodePlan, NodeProcess, WorkerPlan
from engines.processes.process_setup import C_LIBRARIES
from engines.workers.cluster import Cluster, RemoteWorkers
from engines.workers.placement import NodeResources, place

CONNECT_TIMEOUT = 60.0  # seconds to log in and start Python
LOOK_EVERY = 1.0  # seconds between looks at the connections
AGAIN_AFTER = 10.0  # seconds until a broken connection is made again
OPTIONS = ("-oBatchMode=yes", "-oLogLevel=ERROR", "-oServerAliveInterval=15")
# The image that workers are forked from must have no thread pools.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
VARIABLES = " ".join(f"{name}={value}" for name, value in (C_LIBRARIES | ONE_THREAD).items())


def start(
    config: ClusterConfig, env: Environments, certificates: Certificates | None
) -> StartedCluster:
    """The scheduler in a node process here, nannies in one on each machine."""
    hosts = config.ssh.hosts
    workers = workers_of(config, env, machines_of(config))
    node = NodeProcess(
        NodePlan(
            no_workers_timeout=config.no_workers_timeout,
            workers=(),
            host=listening_address(config.host),
            certificates=certificates,
            dashboard=config.dashboard,
        ),
        config.start_timeout,
    )
    plans = {
        host: NodePlan(
            no_workers_timeout=config.no_workers_timeout,
            workers=tuple(workers[host]),
            host=None,
            scheduler=node.address,
            certificates=certificates,
        )
        for host in hosts
    }
    nodes = RemoteNodes(config, plans)
    try:
        nodes.open()
    except BaseException:
        nodes.close()
        node.end()
        raise
    return StartedCluster(address=node.address, node=node, remote=nodes)


def check(config: ClusterConfig) -> None:
    """ValueError when a machine cannot be used, or the pools do not fit on them."""
    place(config.pools, list(machines_of(config).values()))


def machines_of(config: ClusterConfig) -> dict[str, NodeResources]:
    """What each machine offers."""
    hosts = config.ssh.hosts
    with ThreadPoolExecutor(len(hosts)) as threads:
        offers = threads.map(lambda host: look_at(config, host), hosts)
        return dict(zip(hosts, offers, strict=True))


def command(config: ClusterConfig, host: str, module: str) -> list[str]:
    """Run a Python module of ours on a machine."""
    there = f"env {VARIABLES} {shlex.quote(config.ssh.python)} -P -m {module}"
    if config.ssh.folder is not None:
        there = f"cd {shlex.quote(config.ssh.folder)} && exec {there}"
    return ["ssh", *OPTIONS, *config.ssh.options, host, there]


def look_at(config: ClusterConfig, host: str) -> NodeResources:
    """What a machine offers; ValueError when it cannot be used."""
    try:
        process = subprocess.run(
            command(config, host, "engines.clusters.machine"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CONNECT_TIMEOUT,
            check=False,
        )
    except FileNotFoundError:
        raise ValueError("cluster.kind = ssh, but there is no program ssh. Install it.") from None
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"cluster.ssh.hosts: {host} did not answer within {CONNECT_TIMEOUT:g} s. "
            f"Try: ssh {host}"
        ) from None
    if process.returncode != 0:
        complaint = (process.stderr.strip().splitlines() or [f"exit status {process.returncode}"])[
            -1
        ]
        raise ValueError(
            f"cluster.ssh.hosts: {host} cannot be used: {complaint}. It needs a login without a "
            "password, and Refrain in cluster.ssh.python."
        )
    facts = json.loads(process.stdout.splitlines()[-1])
    for name, here in versions().items():
        if facts["versions"][name] != here:
            raise ValueError(
                f"cluster.ssh.hosts: {host} has {name} {facts['versions'][name]}, this machine "
                f"{here}. Install the same version there, or set cluster.ssh.python."
            )
    return NodeResources(name=host, cores=facts["node"]["cores"], gpus=tuple(facts["node"]["gpus"]))


def workers_of(
    config: ClusterConfig, env: Environments, machines: Mapping[str, NodeResources]
) -> dict[str, list[WorkerPlan]]:
    """The workers of each machine, checked machine by machine."""
    forwarded = given(config.ssh.forward_environment)
    plans: dict[str, list[WorkerPlan]] = {host: [] for host in machines}
    for placed in place(config.pools, list(machines.values())):
        plans[placed.node].append(
            WorkerPlan(
                name=placed.name,
                pool=placed.pool,
                slots=config.pools[placed.pool].slots,
                env={**forwarded, **placed.env, **env[placed.pool]},
            )
        )
    return plans


class RemoteNodes(RemoteWorkers):
    """The node processes on other machines, which have no time limit and may come back."""

    def __init__(self, config: ClusterConfig, plans: Mapping[str, NodePlan]) -> None:
        self._config = config
        self._plans = plans
        self._nodes: dict[str, NodeProcess] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Connect to every machine that has workers, at once."""
        hosts = [host for host, plan in self._plans.items() if plan.workers]
        with ThreadPoolExecutor(len(hosts)) as threads:
            list(threads.map(self._connect, hosts))

    def _connect(self, host: str) -> None:
        words = command(self._config, host, "engines.processes.node")
        try:
            self._nodes[host] = NodeProcess(self._plans[host], CONNECT_TIMEOUT, words)
        except ClusterLost as error:
            raise ClusterLost(f"{host}: {error}. Try: ssh {host}") from None

    def watch(self, cluster: Cluster) -> None:
        """Connect again, in a thread, to machines whose connection broke."""

        def look() -> None:
            while not self._over.wait(LOOK_EVERY):
                for host, node in list(self._nodes.items()):
                    if node.exit_status() is None or self._over.wait(AGAIN_AFTER):
                        continue
                    node.end()
                    with contextlib.suppress(ClusterLost):
                        self._connect(host)

        self._thread = threading.Thread(target=look, name="ssh", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the workers on every machine."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._nodes:
            with ThreadPoolExecutor(len(self._nodes)) as threads:
                list(threads.map(NodeProcess.end, self._nodes.values()))
