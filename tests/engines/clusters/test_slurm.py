"""Workers as jobs of a real Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from configs.cluster import ClusterConfig, PoolConfig
from engines.clusters import slurm as slurm_cluster
from engines.clusters.opening import open_cluster
from engines.clusters.slurm import job_scripts
from engines.clusters.slurm_jobs import seconds
from engines.processes.dask_settings import certificates_for
from engines.processes.process_setup import C_LIBRARIES
from engines.workers import calls
from engines.workers.cluster import Cluster
from tests.engines.conftest import one_pool_roles
from tests.engines.workers.dummies import dummy, request
from tests.slurm import Slurm

pytestmark = pytest.mark.cluster

DEADLINE = 60.0


def config(folder: Path, **slurm: object) -> ClusterConfig:
    """Two pools on Slurm."""
    return ClusterConfig.model_validate(
        {
            "kind": "slurm",
            "host": "127.0.0.1",
            "slurm": {"folder": str(folder), **slurm},
            "pools": {
                "pair": PoolConfig(workers=2, slots=2, env={"REFRAIN_TEST": "it's here"}),
                "solo": PoolConfig(threads=2, slots=1, memory_gib=0.5),
            },
            "roles": one_pool_roles("pair"),
            "no_workers_timeout": 60.0,
        }
    )


def call(cluster: Cluster, address: str, method: str, **kwargs: object) -> object:
    calls.build(cluster, address, "role", dummy(), deadline=DEADLINE)
    return calls.submit(cluster, address, request(method, **kwargs), deadline=DEADLINE)


def until(done, what: str, timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < end, f"not in {timeout:g} s: {what}"
        time.sleep(0.2)


def test_a_pools_script_asks_for_its_resources(tmp_path: Path) -> None:
    wanted = config(
        tmp_path,
        partition="main",
        account="team",
        time_limit=90,
        directives=["--qos=high"],
        prologue=["module load cuda"],
        pools={"solo": {"partition": "gpu", "directives": ["--constraint=a100"]}},
    )
    pools = {**wanted.pools, "solo": wanted.pools["solo"].model_copy(update={"gpus": 2})}
    wanted = wanted.model_copy(update={"pools": pools})
    files = certificates_for(wanted.encryption)
    assert files is not None
    files = files.as_files(tmp_path / "tls")
    assert (tmp_path / "tls/key.pem").stat().st_mode & 0o777 == 0o600
    scripts = job_scripts(wanted, "run", {"solo": {"A": "it's"}}, "tls://h:1", files)
    text = scripts["solo"]
    lines = text.splitlines()
    for line in (
        "#SBATCH -J run-solo",
        "#SBATCH -p gpu",
        "#SBATCH -A team",
        "#SBATCH --cpus-per-task=2",
        "#SBATCH --mem=512M",
        "#SBATCH -t 2",
        "#SBATCH --qos=high",
        "#SBATCH --constraint=a100",
        "#SBATCH --gres=gpu:2",
        "module load cuda",
        "export OMP_NUM_THREADS=2",
    ):
        assert line in lines
    worker = lines[-1] if lines[-1] else lines[-2]
    assert "--name solo-$SLURM_ARRAY_TASK_ID" in worker
    assert worker.count("--nthreads 2 ") == 1
    assert "--resources solo=1" in worker
    assert f"--tls-key {tmp_path}/tls/key.pem" in worker
    assert "PRIVATE KEY" not in text
    quoted = subprocess.run(
        ["bash", "-c", next(line for line in lines if line.startswith("export A=")) + "; echo $A"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert quoted.stdout == "it's\n"
    other = scripts["pair"].splitlines()
    assert "#SBATCH -p main" in other
    assert not [line for line in other if "--mem=" in line or "--gres" in line]


def test_a_script_is_this_to_the_letter(tmp_path: Path) -> None:
    wanted = config(tmp_path, python="/opt/python", account="team", time_limit=61)
    scripts = job_scripts(wanted, "run", {"solo": {"A": "1 2"}}, "tcp://h:1", None)
    assert scripts["solo"].splitlines() == [
        "#!/usr/bin/env bash",
        "",
        "#SBATCH -J run-solo",
        "#SBATCH -A team",
        "#SBATCH -n 1",
        "#SBATCH --cpus-per-task=2",
        "#SBATCH --mem=512M",
        "#SBATCH -t 2",
        *(f"export {name}={value}" for name, value in C_LIBRARIES.items()),
        "export OMP_NUM_THREADS=2",
        "export MKL_NUM_THREADS=2",
        "export A='1 2'",
        "export CUDA_VISIBLE_DEVICES=''",
        "exec /opt/python -P -m engines.clusters.worker tcp://h:1 --name solo-$SLURM_ARRAY_TASK_ID "
        '--local-directory "${TMPDIR:-/tmp}" --death-timeout 60 --nthreads 2 --resources solo=1',
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0:05", 5),
        ("1:00:00", 3600),
        ("2-00:00:01", 172801),
        ("UNLIMITED", None),
        ("INVALID", None),
    ],
)
def test_slurms_durations(text: str, value: float | None) -> None:
    assert seconds(text) == value


def test_pools_are_job_arrays_and_none_is_left(slurm: Slurm, tmp_path: Path) -> None:
    with open_cluster(config(tmp_path, name="run-1")) as cluster:
        assert list(cluster.workers("pair")) == ["pair-0", "pair-1"]
        address = cluster.workers("pair")["pair-0"]
        assert address.startswith("tls://127.0.0.1:")
        assert call(cluster, address, "environ", name="REFRAIN_TEST") == "it's here"
        assert call(cluster, address, "environ", name="SLURM_JOB_NAME") == "run-1-pair"
        solo = cluster.workers("solo")["solo-0"]
        assert call(cluster, solo, "environ", name="OMP_NUM_THREADS") == "2"
        assert call(cluster, solo, "threads") == 2
        names = sorted(line.split()[1] for line in slurm.jobs())
        assert names == ["run-1-pair", "run-1-pair", "run-1-solo"]
        arrays = {line.split()[0].split("_")[0] for line in slurm.jobs() if "pair" in line}
        assert len(arrays) == 1
        call(cluster, address, "say", text="a line of the engine")
        assert "a line of the engine" in (tmp_path / "run-1/pair-0.log").read_text()

        cluster.kill([address])  # its nanny brings it back within the job
        until(lambda: cluster.workers("pair").get("pair-0", address) != address, "pair-0 is back")
        assert len(slurm.jobs()) == 3
    assert slurm.jobs() == []
    assert not (tmp_path / "run-1/tls").exists()


@pytest.mark.slow
def test_a_job_that_ends_is_replaced(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_cluster, "LOOK_EVERY", 0.5)
    with open_cluster(config(tmp_path, name="run-2")) as cluster:
        job = next(line.split()[0] for line in slurm.jobs() if "solo" in line)
        slurm.ask("scancel", job)
        until(lambda: list(cluster.workers("solo")) == ["solo-1"], "solo-1 has come")
        assert call(cluster, cluster.workers("solo")["solo-1"], "count") == 1
    assert slurm.jobs() == []


@pytest.mark.slow
def test_a_worker_hands_over_before_its_time_limit(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_cluster, "LOOK_EVERY", 0.5)
    monkeypatch.setattr(slurm_cluster, "IDLE", 0.5)
    wanted = config(tmp_path, name="run-3", time_limit=60, handover=50)
    with open_cluster(wanted) as cluster:
        old = cluster.workers("solo")["solo-0"]
        results = []
        nap = threading.Thread(
            target=lambda: results.append(call(cluster, old, "nap", seconds=20.0))
        )
        nap.start()
        until(lambda: list(cluster.workers("solo")) == ["solo-1"], "solo-1 takes the calls")
        assert "solo-0" in cluster.members("solo")  # it finishes what it has begun
        new = cluster.workers("solo")["solo-1"]
        assert call(cluster, new, "count") == 1
        nap.join()
        assert results == [1]
        until(lambda: "solo-0" not in cluster.members("solo"), "solo-0 has gone")
        until(lambda: len(slurm.jobs()) == 3, "the old jobs are gone")
    assert slurm.jobs() == []


def test_a_refused_job_is_one_sentence(slurm: Slurm, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sbatch refused: .*invalid partition.*cluster\.slurm"):
        open_cluster(config(tmp_path, partition="nowhere"))
    assert slurm.jobs() == []


@pytest.mark.slow
def test_jobs_that_die_at_once_are_not_submitted_for_ever(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_cluster, "LOOK_EVERY", 0.5)
    with pytest.raises(
        RuntimeError, match=r"jobs of pool '\w+' ended before their workers had joined"
    ):
        open_cluster(config(tmp_path, prologue=["exit 3"]))
    assert slurm.jobs() == []


KILLED = """
import sys, time
from configs.cluster import ClusterConfig
from engines.clusters.opening import open_cluster
with open_cluster(ClusterConfig.model_validate_json(sys.argv[1])):
    print("open", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_no_job_outlives_a_killed_flow(slurm: Slurm, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, config(tmp_path).model_dump_json()],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "open\n"
        assert len(slurm.jobs()) == 3
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    until(lambda: slurm.jobs() == [], "the queue is empty", 20.0)
