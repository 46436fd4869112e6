"""Workers that are forked with the engines' libraries are like those that import them."""

from __future__ import annotations

import os
import subprocess
import sys

import httpx
import pytest

from configs.cluster import ClusterConfig, PoolConfig
from engines.clusters.opening import open_cluster
from engines.processes.node import WORKER_IMAGE, NodePlan, NodeProcess, WorkerPlan
from engines.workers import calls
from tests.engines.conftest import one_pool_roles
from tests.engines.workers.dummies import request
from tests.engines.workers.test_cluster import build, call
from tests.ports import free_port

SEAT = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}


def test_forked_workers_have_torch_and_their_own_threads() -> None:
    config = ClusterConfig(
        pools={"one": PoolConfig(slots=2), "two": PoolConfig(threads=2, slots=2)},
        roles=one_pool_roles("one"),
    )
    with open_cluster(config, preload=["torch"]) as cluster:
        for pool, threads in (("one", 1), ("two", 2)):
            worker = next(iter(cluster.wait(pool).values()))
            build(cluster, worker)
            assert call(cluster, worker, "loaded", module="torch"), "before anything imported it"
            assert call(cluster, worker, "threads") == threads
            assert calls.control(cluster, worker, request("threads")) == threads


def test_a_worker_of_a_job_keeps_the_jobs_gpus() -> None:
    """Slurm and Kubernetes give GPUs to the process that Dask's worker is forked from."""
    code = (
        "import multiprocessing, os\n"
        "from engines.processes.node import start_fork_server\n"
        "def say(): print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n"
        "start_fork_server()\n"
        "say()\n"
        "child = multiprocessing.get_context('forkserver').Process(target=os.system, "
        "args=('echo $CUDA_VISIBLE_DEVICES',))\n"
        "child.start(); child.join()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "3"},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["3", "3"]


@pytest.mark.parametrize(
    ("env", "loaded"),
    [
        ({}, True),
        ({"VLLM_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}, True),
        ({"HF_HOME": "/models"}, False),
        ({"CUDA_VISIBLE_DEVICES": "0"}, False),
    ],
)
def test_what_a_library_reads_at_its_import_is_still_to_come(
    env: dict[str, str], loaded: bool
) -> None:
    seats = ({}, env)
    plan = NodePlan(
        no_workers_timeout=1.0,
        workers=tuple(
            WorkerPlan(name=f"p-{n}", pool="p", slots=1, env={**SEAT, **more})
            for n, more in enumerate(seats)
        ),
        preload=("torch",),
    )
    assert plan.preloaded == ((WORKER_IMAGE, "torch") if loaded else (WORKER_IMAGE,))


@pytest.mark.cluster
def test_dasks_dashboard_is_there_where_it_was_asked_for() -> None:
    port = free_port()
    for asked, status in ((f"127.0.0.1:{port}", 200), (None, None)):
        node = NodeProcess(NodePlan(no_workers_timeout=5.0, workers=(), dashboard=asked), 60.0)
        try:
            if status is None:
                with pytest.raises(httpx.ConnectError):
                    httpx.get(f"http://127.0.0.1:{port}/status")
            else:
                assert httpx.get(f"http://{asked}/status", timeout=30.0).status_code == status
        finally:
            node.end()
