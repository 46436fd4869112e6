"""Pods: the resources fit their schemas, and are created and removed. No Kubernetes runs here."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import jsonschema
import pytest
import yaml

from configs.cluster.cluster import ClusterConfig, PoolConfig
from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from engines.clusters import kubernetes
from engines.clusters import kubernetes as pods
from tests.engines.conftest import one_pool_roles

validate = pytest.importorskip("kubernetes_validate").validate

VERSION = "1.32"  # of Kubernetes, whose schemas count
MANIFESTS = sorted((Path(__file__).parents[3] / "infra/kubernetes").glob("*.yaml"))

# From the CRDs of dask-kubernetes 2026.3.0 (BSD-3-Clause); the specs of pods and services, which
# they repeat in full, are checked as a Pod and a Service instead.
OBJECT = {"type": "object"}
WORKER = {
    "type": "object",
    "required": ["spec"],
    "additionalProperties": False,
    "properties": {"replicas": {"type": "integer"}, "metadata": OBJECT, "spec": OBJECT},
}
SCHEDULER = {
    "type": "object",
    "required": ["spec", "service"],
    "additionalProperties": False,
    "properties": {"metadata": OBJECT, "spec": OBJECT, "service": OBJECT},
}
CRDS = {
    "DaskCluster": {
        "type": "object",
        "required": ["scheduler", "worker"],
        "additionalProperties": False,
        "properties": {
            "idleTimeout": {"type": "integer"},
            "scheduler": SCHEDULER,
            "worker": WORKER,
        },
    },
    "DaskWorkerGroup": {
        "type": "object",
        "required": ["cluster", "worker"],
        "additionalProperties": False,
        "properties": {"cluster": {"type": "string"}, "worker": WORKER},
    },
}


def config(**cluster: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "kind": "kubernetes",
            "kubernetes": {
                "image": "registry/refrain:1",
                "namespace": "rl",
                "service_account": "refrain-worker",
                "secret": "refrain-credentials",
                "tls_secret": "refrain-tls",
                "pools": {"gpus": {"node_selector": {"gpu": "h200"}, "shared_memory_gib": 8}},
            },
            "tls": {"kind": "files", "ca_file": "/tls/ca.pem", "cert": "/tls/c.pem", "key": "/tls/k.pem"},
            "pools": {
                "gpus": PoolConfig(workers=2, gpus=4, threads=8, slots=3, memory_gib=64),
                "cpu": PoolConfig(env={"A": "b"}),
            },
            "roles": one_pool_roles("gpus"),
            **cluster,
        }
    )  # fmt: skip


def check(resource: pods.Resource) -> None:
    """As the API server and the operator would."""
    jsonschema.validate(resource["spec"], CRDS[resource["kind"]])
    for part in ("worker", "scheduler"):
        if part in resource["spec"]:
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
            validate({**pod, "spec": resource["spec"][part]["spec"]}, VERSION, strict=True)
    if "scheduler" in resource["spec"]:
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}}
        service = {**service, "spec": resource["spec"]["scheduler"]["service"]}
        validate(service, VERSION, strict=True)


def test_a_pool_is_a_worker_group_with_its_resources() -> None:
    wanted = config()
    cluster = pods.dask_cluster(wanted, "run", {"name": "flow", "uid": "u"})
    group = pods.worker_group(wanted, "run", "gpus", {"B": "c"})
    plain = pods.worker_group(config(tls=None), "run", "cpu", {"A": "b"})
    for resource in (cluster, group, plain, pods.dask_cluster(config(tls=None), "run", None)):
        check(resource)
    assert cluster["metadata"]["ownerReferences"][0]["uid"] == "u"
    worker = group["spec"]["worker"]
    assert worker["replicas"] == 2
    assert worker["spec"]["nodeSelector"] == {"gpu": "h200"}
    (container,) = worker["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4", "memory": "65536Mi"}
    assert {"name": "B", "value": "c"} in container["env"]
    assert {"name": "OMP_NUM_THREADS", "value": "8"} in container["env"]
    words = container["args"]
    assert words[4] == "tls://run-scheduler.rl.svc:8786"
    assert words[words.index("--resources") + 1] == "gpus=3"
    assert words[words.index("--tls-key") + 1] == "/tls/k.pem"
    assert "tls" not in json.dumps(plain)


def test_a_wrong_resource_does_not_pass() -> None:
    group = pods.worker_group(config(), "run", "cpu", {})
    group["spec"]["worker"]["spec"]["containers"][0]["enviroment"] = []
    with pytest.raises(Exception, match="enviroment"):
        check(group)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_manifests_fit_kubernetes_schemas(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))
    assert documents
    for document in documents:
        validate(document, VERSION, strict=True)


def test_the_runs_manifest_names_settings_that_exist() -> None:
    (run,) = [path for path in MANIFESTS if path.name == "run.yaml"]
    (container,) = yaml.safe_load(run.read_text())["spec"]["template"]["spec"]["containers"]
    words = container["args"]
    assert words[:2] == ["refrain", "grpo"]
    made = load_recipe(GRPOConfig, words[2], words[3:])
    assert made.cluster.kind == "kubernetes"


def test_names_of_pods_are_checked() -> None:
    with pytest.raises(ValueError, match="lower-case"):
        config(pools={"GPU_a": PoolConfig()}, roles=one_pool_roles("GPU_a"))


class Api(BaseHTTPRequestHandler):
    """As much of Kubernetes' API as creating and removing takes."""

    seen: ClassVar[list[tuple[str, str]]]
    refuse = False

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.answer(200, {"major": "1", "minor": "32", "gitVersion": "v1.32.0"})

    def do_POST(self) -> None:
        resource = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refuse:
            refused = {"kind": "Status", "status": "Failure", "message": "not allowed", "code": 403}
            self.answer(403, refused)
            return
        check(resource)
        type(self).seen.append(("create", f"{self.path} {resource['metadata']['name']}"))
        self.answer(201, resource)

    def do_DELETE(self) -> None:
        type(self).seen.append(("delete", self.path))
        self.answer(200, {"kind": "Status", "status": "Success"})

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Api]]:
    pytest.importorskip("kr8s")

    class Fresh(Api):
        seen: ClassVar = []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Fresh)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [
            {"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        ],
        "users": [{"name": "me", "user": {}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    yield Fresh
    server.shutdown()
    server.server_close()


def test_resources_are_created_and_removed(api: type[Api]) -> None:
    started = kubernetes.start(config(), {"gpus": {}, "cpu": {}}, None)
    name = started.address.removeprefix("tls://").partition("-scheduler")[0]
    root = "/apis/kubernetes.dask.org/v1/namespaces/rl"
    assert api.seen == [
        ("create", f"{root}/daskclusters {name}"),
        ("create", f"{root}/daskworkergroups {name}-gpus"),
        ("create", f"{root}/daskworkergroups {name}-cpu"),
    ]
    api.seen.clear()
    assert started.remote is not None
    started.remote.close()
    assert [path.rpartition("/")[2] for what, path in api.seen if what == "delete"] == [
        f"{name}-cpu",
        f"{name}-gpus",
        name,
    ]


def test_a_refusal_is_one_sentence(api: type[Api]) -> None:
    api.refuse = True
    with pytest.raises(ValueError, match=r"Kubernetes refused DaskCluster .*not allowed"):
        kubernetes.start(config(), {"gpus": {}, "cpu": {}}, None)
