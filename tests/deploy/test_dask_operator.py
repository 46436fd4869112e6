"""What Dask's operator makes of our resources: its own functions, of the package from the index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from engines.clusters import kubernetes
from tests.engines.clusters.test_kubernetes import (
    SCHEDULER,
    WORKER,
    dependents,
    fits,
    with_everything,
)

OPERATOR = "dask-kubernetes==2026.3.0"
PROGRAM = """
import json, sys
from importlib.resources import files
import yaml
from dask_kubernetes.operator.controller import controller
cluster, group = json.load(sys.stdin)

def words(part, labels):
    meta = part.get("metadata", {})
    return meta.get("annotations", {}), {**labels, **meta.get("labels", {})}

scheduler, name = cluster["spec"]["scheduler"], cluster["metadata"]["name"]
annotations, labels = words(scheduler, cluster["metadata"]["labels"])
made = [
    controller.build_scheduler_service_spec(name, scheduler["service"], annotations, labels),
    controller.build_scheduler_deployment_spec(name, scheduler["spec"], annotations, labels),
]
worker = group["spec"]["worker"]
annotations, labels = words(worker, group["metadata"]["labels"])
for number in range(worker["replicas"]):
    made.append(controller.build_worker_deployment_spec(
        group["metadata"]["name"], group["metadata"]["namespace"], group["spec"]["cluster"],
        f"{number:010x}", worker["spec"], annotations, labels))
text = files("dask_kubernetes.operator.customresources").joinpath("templates.yaml").read_text()
crds = yaml.safe_load(text)["definitions"]
json.dump({"made": made, "crds": crds}, sys.stdout)
"""


@pytest.mark.slow
def test_the_operator_makes_what_the_tests_say(tmp_path: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("uv is not installed beside this Python (make test installs it)")
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    done = subprocess.run(
        [uv, "pip", "install", "--quiet", "--python", python, OPERATOR],
        env={**os.environ, "UV_SYSTEM_CERTS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"the package index does not give {OPERATOR}: {done.stderr[-300:]}")
    wanted = with_everything(gang={"kind": "kueue", "queue": "team"})
    cluster = kubernetes.dask_cluster(wanted, "run", None)
    group = kubernetes.worker_group(wanted, "run", "gpus", {"A": "b"})
    answer = subprocess.run(
        [python, "-c", PROGRAM],
        input=json.dumps([cluster, group]),
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr
    theirs: dict[str, Any] = json.loads(answer.stdout)
    assert theirs["made"] == [made for one in (cluster, group) for _, made in dependents(one)]
    for made in theirs["made"]:
        fits(made)
    for name, ours in (("DaskWorker", WORKER), ("DaskScheduler", SCHEDULER)):
        crd = theirs["crds"][f"dask.k8s.api.v1.{name}"]
        assert crd["properties"].keys() == ours["properties"].keys()
        assert crd["required"] == ours["required"]
        # The API server drops what this version's pods did not have, whatever its own version.
        assert "k8s-1.21.1.json" in crd["properties"]["spec"]["$ref"]
