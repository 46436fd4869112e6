"""Several workers in a job of a real Slurm, whose GPUs are names of /dev/null."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from configs.cluster import ClusterConfig, PoolConfig
from engines.clusters import slurm as slurm_cluster
from engines.clusters.job_workers import shares
from engines.clusters.opening import open_cluster
from engines.clusters.slurm import job_scripts
from tests.engines.clusters.test_slurm import call, until
from tests.engines.conftest import one_pool_roles
from tests.slurm import Slurm

pytestmark = pytest.mark.cluster

MODULE = "engines.clusters.job_workers"


def config(folder: Path, name: str) -> ClusterConfig:
    """A pool of two workers in one job."""
    return ClusterConfig.model_validate(
        {
            "kind": "slurm",
            "host": "127.0.0.1",
            "slurm": {
                "folder": str(folder),
                "name": name,
                "pools": {"pair": {"workers_per_job": 2}},
            },
            "pools": {"pair": PoolConfig(workers=2, gpus=1, threads=2, memory_gib=1.5)},
            "roles": one_pool_roles("pair"),
            "no_workers_timeout": 60.0,
        }
    )


def processes(mark: str) -> list[psutil.Process]:
    """Processes with a word on their command line."""
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if any(mark in word for word in one.info["cmdline"] or ())
    ]


def nanny(log_folder: Path, name: str) -> psutil.Process:
    """The process that a job started for a worker."""
    (found,) = [
        one
        for one in processes("engines.clusters.worker")
        if name in one.cmdline() and str(log_folder) in " ".join(one.parent().cmdline())
    ]
    return found


def test_a_job_asks_for_what_all_its_workers_need(tmp_path: Path) -> None:
    scripts = job_scripts(config(tmp_path, "run"), "run", {}, "tls://h:1", None)
    lines = scripts["pair"].splitlines()
    for line in ("#SBATCH -n 1", "#SBATCH --cpus-per-task=4", "#SBATCH --mem=3G"):
        assert line in lines
    assert "#SBATCH --gres=gpu:2" in lines
    assert "export OMP_NUM_THREADS=2" in lines
    command = next(line for line in lines if MODULE in line)
    assert f"{MODULE} {tmp_path}/run 2 1 tls://h:1 " in command
    named = subprocess.run(
        ["bash", "-c", f"SLURM_ARRAY_TASK_ID=3; printf '%s|' {command.partition('tls://h:1')[2]}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert named.startswith("--name|pair-6|")


def test_devices_of_a_job_are_shared_out() -> None:
    assert shares(("4", "5", "6", "7"), 2, 2) == ["4,5", "6,7"]
    assert shares(("GPU-a",), 2, 1) == ["GPU-a", ""]
    assert shares((), 2, 0) == ["", ""]


def test_workers_of_a_job_live_and_die_apart(slurm: Slurm, tmp_path: Path) -> None:
    logs = tmp_path / "run-1"
    with open_cluster(config(tmp_path, "run-1")) as cluster:
        before = cluster.workers("pair")
        assert list(before) == ["pair-0", "pair-1"]
        first, second = before.values()
        assert [line.split()[1] for line in slurm.jobs()] == ["run-1-pair"]
        for address, own in ((first, "0"), (second, "1")):
            assert call(cluster, address, "environ", name="CUDA_VISIBLE_DEVICES") == own
            assert call(cluster, address, "environ", name="OMP_NUM_THREADS") == "2"
        call(cluster, second, "say", text="a line of the second")
        assert "a line of the second" in (logs / "pair-1.log").read_text()
        assert "a line of the second" not in (logs / "pair-0.log").read_text()
        assert call(cluster, first, "count") == 1

        nanny(logs, "pair-1").kill()
        until(lambda: cluster.workers("pair").get("pair-1", second) != second, "pair-1 is back")
        assert cluster.workers("pair")["pair-0"] == first
        assert call(cluster, first, "count") == 2  # its engine stands
        assert call(cluster, cluster.workers("pair")["pair-1"], "count") == 1
        assert [line.split()[0] for line in slurm.jobs()] == [slurm.jobs()[0].split()[0]]
        assert "ended (status -9): it is started again" in (logs / "pair-1.log").read_text()
    assert slurm.jobs() == []
    assert processes(str(logs)) == []


@pytest.mark.slow
def test_workers_end_with_their_job_and_are_replaced_together(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_cluster, "LOOK_EVERY", 0.5)
    with open_cluster(config(tmp_path, "run-2")) as cluster:
        (job,) = [one for one in processes(MODULE) if str(tmp_path) in " ".join(one.cmdline())]
        below = job.children(recursive=True)
        assert len(below) >= 4  # of each worker a nanny and a worker
        job.kill()
        until(lambda: not any(one.is_running() for one in below), "its processes have ended", 10.0)
        until(lambda: list(cluster.workers("pair")) == ["pair-2", "pair-3"], "others have come")
        own = [
            call(cluster, address, "environ", name="CUDA_VISIBLE_DEVICES")
            for address in cluster.workers("pair").values()
        ]
        assert sorted(str(one) for one in own) == ["0", "1"]
    assert slurm.jobs() == []


def job_of_two(folder: Path, scheduler: str, *words: str) -> subprocess.Popen[bytes]:
    """What a job runs for two workers."""
    name = ["--name", "pair-2"]
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, str(folder), "2", "0", scheduler, *name, *words],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )


@pytest.mark.slow
def test_a_worker_that_never_starts_ends_its_job(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        job = job_of_two(tmp_path, f"tcp://127.0.0.1:{port}", "--no-such-option")
        assert job.wait(120) == 1
    logs = [(tmp_path / f"pair-{n}.log").read_text() for n in (2, 3)]
    ended = [log for log in logs if "so the whole job ends" in log]  # by whichever was first
    assert ended
    assert all(log.count("No such option") == 3 for log in ended)
    assert processes(str(tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("cancelled", [True, False])
def test_a_job_ends_with_its_scheduler_or_when_told(tmp_path: Path, cancelled: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    wait = [] if cancelled else ["--death-timeout", "1"]
    job = job_of_two(tmp_path, f"tcp://127.0.0.1:{port}", *wait)
    until(lambda: (tmp_path / "pair-3.log").exists(), "the workers start")
    if cancelled:
        job.send_signal(signal.SIGTERM)
    assert job.wait(90) == 0
    assert "started again" not in (tmp_path / "pair-3.log").read_text()
    assert processes(str(tmp_path)) == []
