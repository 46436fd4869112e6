"""Workers that people start for runs to join: as the settings say, and back whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from distributed import Security

from configs.cluster import ClusterConfig, PoolConfig
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from engines.clusters import job_workers, own_workers
from engines.clusters.job_workers import JobWorker
from engines.clusters.opening import open_cluster
from engines.clusters.own_workers import check_fits, keep
from engines.processes.dask_settings import Certificates
from engines.workers import calls
from engines.workers.cluster import Cluster
from engines.workers.placement import NodeResources
from tasks.launch.own_workers import hold
from tests.engines.conftest import left_after, one_pool_roles
from tests.engines.workers.dummies import dummy, request
from tests.ports import free_port
from tests.second_machine import second_machine

ROOT = Path(__file__).parents[3]
CUT = 45  # seconds; Dask gives a connection up after 30


@contextlib.contextmanager
def started(folder: Path, name: str, *words: str, namespace: str | None = None) -> Iterator[int]:
    """A command of ours in a session of its own; yields its pid."""
    inside = ["ip", "netns", "exec", namespace] if namespace else []
    with (folder / f"{name}.txt").open("wb") as out:
        process = subprocess.Popen(
            [*inside, sys.executable, "-m", *words],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "DASK_DISTRIBUTED__WORKER__DAEMON": "False",
            },
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield process.pid
    finally:
        pids = [one.pid for one in [*psutil.Process(process.pid).children(recursive=True)]]
        process.terminate()
        process.wait(30)
        assert left_after(10, pids) == []


def scheduler(folder: Path, address: str, *words: str) -> contextlib.AbstractContextManager[int]:
    host, port = address.rpartition("//")[2].split(":")
    own = ["--host", host, "--port", port, "--dashboard-address", "127.0.0.1:0"]
    return started(folder, "scheduler", "engines.clusters.scheduler", *own, *words)


def until_back(cluster: Cluster, before: dict[str, str], seconds: float) -> None:
    """Wait until each worker of the pool is there under its name, as a new process."""
    end = time.monotonic() + seconds
    while True:
        now = cluster.workers("pair")
        if now.keys() == before.keys() and all(now[name] != before[name] for name in now):
            return
        assert time.monotonic() < end, (before, now)
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.cluster
def test_workers_are_as_the_settings_say_and_come_back(tmp_path: Path) -> None:
    made = Security.temporary()
    files = Certificates(
        ca=made.tls_ca_file, cert=made.tls_client_cert, key=made.tls_client_key
    ).as_files(tmp_path / "tls")
    address = f"tls://127.0.0.1:{free_port()}"
    tls = ["--protocol", "tls", "--tls-ca-file", files.ca]
    tls += ["--tls-cert", files.cert, "--tls-key", files.key]
    pools = {"pair": PoolConfig(workers=2, slots=3, env={"REFRAIN_TEST": "own"})}
    config = ClusterConfig.model_validate(
        {
            "kind": "address",
            "address": address,
            "tls": {"kind": "files", "ca_file": files.ca, "cert": files.cert, "key": files.key},
            "pools": pools,
            "roles": one_pool_roles("pair"),
        }
    )
    words = ["tiny", f"store.uri=file://{tmp_path}/store", "cluster.kind=address"]
    words += [f"cluster.address={address}", "cluster.tls.kind=files"]
    words += [
        f"cluster.tls.{name}={getattr(config.tls, name)}" for name in ("ca_file", "cert", "key")
    ]
    words += ["cluster.pools.pair.slots=3", "cluster.pools.pair.env={REFRAIN_TEST: own}"]
    worker = ["flows.worker", "pair", "--workers=2", "--name=here", *words]
    with (
        scheduler(tmp_path, address, *tls),
        started(tmp_path, "workers", *worker) as command,
        open_cluster(config) as cluster,
    ):
        before = dict(cluster.workers("pair"))
        assert list(before) == ["pair-here-0", "pair-here-1"]
        seen = cluster.ask(cluster.client.scheduler.identity)["workers"]
        assert {(one["nthreads"], tuple(one["resources"].items())) for one in seen.values()} == {
            (4, (("pair", 3.0),))
        }
        one = next(iter(before.values()))
        calls.build(cluster, one, "role", dummy(), deadline=60)
        for name, value in (("REFRAIN_TEST", "own"), ("OMP_NUM_THREADS", "1")):
            found = calls.submit(cluster, one, request("environ", name=name), deadline=60)
            assert found == value
        for child in psutil.Process(command).children():  # the nannies, and their workers with them
            child.kill()
        until_back(cluster, before, 60)
        assert "it is started again in 2 s" in (tmp_path / "workers.txt").read_text()


@pytest.mark.slow
@pytest.mark.cluster
def test_workers_come_back_after_a_cut_of_the_network(tmp_path: Path) -> None:
    """Ours, and one that somebody started by Dask's own command."""
    with second_machine() as machine:
        address = f"tcp://{machine.own}:{free_port()}"
        words = ["tiny", f"store.uri=file://{tmp_path}/store", "cluster.kind=address"]
        words += [f"cluster.address={address}", "cluster.pools.pair.slots=2"]
        plain = ["dask", "worker", address, "--name=plain", "--resources=pair=2", "--nthreads=3"]
        plain += ["--memory-limit=0", f"--local-directory={tmp_path}"]
        config = ClusterConfig(
            kind="address",
            address=address,
            pools={"pair": PoolConfig(workers=2)},
            roles=one_pool_roles("pair"),
        )
        ours = ["flows.worker", "pair", "--name=ours", *words]
        with (
            scheduler(tmp_path, address),
            started(tmp_path, "ours", *ours, namespace=machine.name),
            started(tmp_path, "plain", *plain, namespace=machine.name),
            open_cluster(config) as cluster,
        ):
            before = dict(cluster.workers("pair"))
            assert list(before) == ["pair-ours-0", "plain"]
            machine.link("down")
            time.sleep(CUT)
            machine.link("up")
            until_back(cluster, before, 60)


class QuickWorker(JobWorker):
    """A worker that ends at once."""

    def start(self) -> None:
        self._began = time.monotonic()
        self.process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])


def test_a_worker_that_ends_at_once_is_started_later_each_time_and_waits_for_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOOK_EVERY", 0.01), ("ASK_EVERY", 0.05), ("FIRST_WAIT", 0.01)):
        monkeypatch.setattr(own_workers, name, value)
    monkeypatch.setattr(job_workers, "kill_orphans", lambda alive: None)  # those of other tests
    port = free_port()
    workers: Sequence[JobWorker] = [QuickWorker("p-0", [], {}, tmp_path / "p-0.log")]
    told: list[int] = []
    said: list[str] = []
    args = (workers, f"tcp://127.0.0.1:{port}", told, said.append)
    thread = threading.Thread(target=keep, args=args)
    thread.start()

    def until(words: str) -> None:
        end = time.monotonic() + 20
        while not any(words in one for one in said):
            assert time.monotonic() < end, said
            time.sleep(0.01)

    try:
        until("does not answer, and workers wait for it")
        assert said[0] == "Worker p-0 ended (status 3): it is started again in 0.02 s."
        with socket.create_server(("127.0.0.1", port)):
            until("answers again")
            until("again in 0.08 s")
    finally:
        told.append(signal.SIGTERM)
        thread.join(10)
    assert [one for one in said if one.startswith("The sched")] == [
        f"The scheduler at tcp://127.0.0.1:{port} does not answer, and workers wait for it.",
        f"The scheduler at tcp://127.0.0.1:{port} answers again.",
    ]
    assert "it is started again in 0.04 s." in (tmp_path / "p-0.log").read_text()


def test_workers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    node = NodeResources(name="n1", cores=4, gpus=("0", "1"))
    check_fits("pair", PoolConfig(gpus=1, threads=4), 2, node)
    with pytest.raises(ValueError, match="need 4 GPUs, and n1 lets this process use 2"):
        check_fits("pair", PoolConfig(gpus=2), 2, node)
    with pytest.raises(ValueError, match="Set it to at most 4"):
        check_fits("pair", PoolConfig(threads=5), 1, node)
    own = load_recipe(GRPOConfig, "tiny")
    with pytest.raises(ConfigError, match="set cluster.kind=address"):
        hold(own, "rollout", 1, "here", tmp_path)
    place = ["cluster.kind=address", "cluster.address=tcp://h:1", "store.uri=file:///shared"]
    joined = load_recipe(GRPOConfig, "tiny", place)
    with pytest.raises(ConfigError, match="rolout is no pool. Name one of"):
        hold(joined, "rolout", 1, "here", tmp_path)
    with pytest.raises(ConfigError, match="--workers = 0"):
        hold(joined, "rollout", 0, "here", tmp_path)
