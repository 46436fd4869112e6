"""What Dask's operator makes of our resources: its own functions, of the package from the index."""

from __future__ import annotations

import json
import subprocess
import venv
from pathlib import Path
from typing import Any

import pytest

from engines.clusters import kubernetes
from tests.engines.clusters.test_kubernetes import CRDS, dependents, fits, with_everything

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
folder = files("dask_kubernetes.operator.customresources")
crds = [yaml.safe_load(folder.joinpath(f"{one}.yaml").read_text()) for one in ("daskcluster", "daskworkergroup")]
json.dump({"made": made, "crds": crds}, sys.stdout)
"""


@pytest.mark.slow
def test_the_operator_makes_what_the_tests_say(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    install = [python, "-m", "pip", "install", "--quiet", OPERATOR]
    done = subprocess.run(install, capture_output=True, text=True)
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
    for crd in theirs["crds"]:
        (version,) = crd["spec"]["versions"]
        schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
        assert set(schema) >= set(CRDS[crd["spec"]["names"]["kind"]]["properties"])
