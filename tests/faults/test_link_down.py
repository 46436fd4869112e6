"""The link to a worker's machine is cut, in a network namespace of its own: the cause is told as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from configs.cluster import ClusterConfig, PoolConfig
from engines.clusters.opening import open_cluster
from engines.failures import NoWorkers, WorkerLost
from engines.workers import calls
from engines.workers.cluster import Cluster, Wait
from tests.engines.conftest import one_pool_roles
from tests.engines.workers.dummies import dummy, request
from tests.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
HERE, THERE = "10.77.91.1", "10.77.91.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass
class Machine:
    """A network namespace that is joined to this one by a link."""

    name: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self) -> None:
        """Take the link down: packets are lost, and nobody is told."""
        ip("link", "set", f"{self.name}-a", "down")


@pytest.fixture
def machine() -> Iterator[Machine]:
    name = f"rf{os.getpid() % 10_000_000}"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip")
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr}")
    try:
        ip("link", "add", f"{name}-a", "type", "veth", "peer", "name", f"{name}-b", "netns", name)
        ip("addr", "add", f"{HERE}/24", "dev", f"{name}-a")
        ip("link", "set", f"{name}-a", "up")
        ip("-n", name, "addr", "add", f"{THERE}/24", "dev", f"{name}-b")
        ip("-n", name, "link", "set", f"{name}-b", "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield Machine(name)
    finally:
        ip("netns", "del", name)


@pytest.fixture
def cluster(machine: Machine, tmp_path: Path) -> Iterator[Cluster]:
    """A scheduler here and a worker there."""
    port = free_port()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
        "DASK_DISTRIBUTED__WORKER__DAEMON": "False",
    }
    dask = [sys.executable, "-m", "distributed.cli"]
    scheduler = [*dask[:2], "distributed.cli.dask_scheduler", "--host", HERE, "--port", str(port)]
    worker = [*dask[:2], "distributed.cli.dask_worker", f"tcp://{HERE}:{port}", "--nanny"]
    worker += ["--host", THERE, "--resources", "far=2", "--nthreads", "2", "--no-dashboard"]
    started = []
    for words in (
        [*scheduler, "--no-dashboard"],
        machine.command(*worker, "--name", "far-0", "--local-directory", str(tmp_path)),
    ):
        started.append(
            subprocess.Popen(
                words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        )
    config = ClusterConfig(
        kind="address",
        address=f"tcp://{HERE}:{port}",
        start_timeout=120,
        no_workers_timeout=45,
        pools={"far": PoolConfig(workers=1, slots=2, threads=1)},
        roles=one_pool_roles("far"),
    )
    try:
        with open_cluster(config) as found:
            yield found
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def test_a_cut_link_is_not_a_process_that_ended(cluster: Cluster, machine: Machine) -> None:
    told: list[Wait] = []
    cluster.outages.say = told.append
    address = cluster.workers("far")["far-0"]
    calls.build(cluster, address, "role", dummy(), deadline=60.0)
    cut = threading.Timer(2.0, machine.cut)
    cut.start()
    with pytest.raises(WorkerLost) as lost:
        asked = request("nap", seconds=240.0)
        calls.submit(cluster, address, asked, deadline=240.0)
    assert "its host or the link to it is down" in str(lost.value)
    assert "its process ended" not in str(lost.value)
    began = time.time()
    with pytest.raises(NoWorkers):
        cluster.wait("far", 1)
    assert [(one.there, one.needed) for one in told] == [(0, 1)], "once, after half a minute"
    assert abs(told[0].since - began) < 5 and abs(told[0].until - began - 45.0) < 5
    assert told[0].cause.startswith("far-0: nothing was heard of it for ")
