"""However the flow process ends, nothing that it started is left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engines.conftest import left_after

pytestmark = pytest.mark.cluster

FLOW = """
import json, os, signal, sys, time
from configs.cluster import ClusterConfig, PoolConfig, RolesConfig
from engines.workers import calls
from engines.clusters.opening import open_cluster
from engines.processes.process_tree import session
from tests.engines.workers.dummies import dummy, request

# A process that a shell started in the background is born ignoring Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
roles = RolesConfig(actor="p", ref="p", rollout="p", reward="p")
with open_cluster(ClusterConfig(pools={"p": PoolConfig(slots=2)}, roles=roles)) as cluster:
    (address,) = cluster.workers("p").values()
    calls.build(cluster, address, "role", dummy(), deadline=60)
    child = calls.submit(cluster, address, request("spawn"), deadline=60)
    pids = [process.pid for process in session(cluster._node.pid)]
    print(json.dumps({"pids": pids, "child": child, "scratch": cluster._node._scratch}), flush=True)
    if sys.argv[1] == "forks" and os.fork() == 0:  # holds the pipe to the node process open
        time.sleep(60)
        os._exit(0)
    calls.submit(cluster, address, request("nap", seconds=60), deadline=90)
"""


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, ""),
        (signal.SIGKILL, "stopped"),
        pytest.param(signal.SIGKILL, "forks", marks=pytest.mark.slow),
        (signal.SIGINT, ""),
        (signal.SIGTERM, ""),
    ],
)
def test_nothing_is_left(number, how):
    flow = subprocess.Popen(
        [sys.executable, "-c", FLOW, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        started = json.loads(flow.stdout.readline())
        assert started["child"] in started["pids"]
        assert len(started["pids"]) >= 5  # node, resource tracker, fork server, worker, its child
        time.sleep(0.3)
        if how == "stopped":
            os.kill(os.getsid(started["child"]), signal.SIGSTOP)  # the node process
        flow.send_signal(number)
        assert left_after(5, [flow.pid, *started["pids"]]) == []
        assert not Path(started["scratch"]).exists()
    finally:
        os.killpg(flow.pid, signal.SIGKILL)
        errors = flow.communicate(timeout=5)[1]
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    assert "distributed." not in errors  # nothing logged by Dask
