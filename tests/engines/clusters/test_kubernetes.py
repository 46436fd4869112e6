"""Pods: the resources fit their schemas, and are created and removed. No Kubernetes runs here."""

from __future__ import annotations

import copy
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import jsonschema
import pytest
import yaml

from configs.cluster import ClusterConfig, PoolConfig
from engines.clusters import kubernetes
from engines.clusters import kubernetes as pods
from tests.engines.conftest import one_pool_roles

validate = pytest.importorskip("kubernetes_validate").validate

VERSIONS = ("1.32", "1.37")  # of Kubernetes, whose schemas count

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
    # Of scheduler-plugins 0.34.
    "PodGroup": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "minMember": {"type": "integer"},
            "minResources": OBJECT,
            "scheduleTimeoutSeconds": {"type": "integer"},
        },
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


def fits(resource: pods.Resource) -> None:
    """Whether both versions of Kubernetes know all that it says."""
    for version in VERSIONS:
        validate(resource, version, strict=True)


def check(resource: pods.Resource) -> None:
    """As the API server and the operator would."""
    jsonschema.validate(resource["spec"], CRDS[resource["kind"]])
    if resource["kind"] == "PodGroup":
        return
    for part in ("worker", "scheduler"):
        if part in resource["spec"]:
            meta = {"name": "x", **resource["spec"][part].get("metadata", {})}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta}
            fits({**pod, "spec": resource["spec"][part]["spec"]})
    if "scheduler" in resource["spec"]:
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}}
        fits({**service, "spec": resource["spec"]["scheduler"]["service"]})


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


# Every setting of pods at once.
EVERYTHING: dict[str, Any] = {
    "labels": {"team": "rl"},
    "annotations": {"linkerd.io/inject": "disabled"},
    "node_selector": {"gpu": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
                ]
            }
        }
    },
    "topology_spread": [
        {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "priority_class": "training",
    "image_pull_secrets": ["registry"],
    "host_network": True,
    "resources": {"rdma/hca_shared_devices_a": "1"},
    "capabilities": ["IPC_LOCK"],
    "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
    "volume_mounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
    "ephemeral_storage_gib": 100,
    "grace_seconds": 600,
    "run_as_user": 2000,
    "patch": {"runtimeClassName": "nvidia", "containers": [{"name": "worker", "tty": True}]},
    "shared_memory_gib": 16,
}


def with_everything(**kubernetes: Any) -> ClusterConfig:
    image = {"image": "registry/refrain:1", "namespace": "rl", "pools": {"gpus": EVERYTHING}}
    return config(tls=None, kubernetes={**image, **kubernetes})


def test_a_pools_pods_have_all_that_the_settings_name() -> None:
    group = pods.worker_group(with_everything(), "run", "gpus", {})
    check(group)
    worker = group["spec"]["worker"]
    assert worker["metadata"] == {
        "labels": EVERYTHING["labels"],
        "annotations": EVERYTHING["annotations"],
    }
    spec = worker["spec"]
    for key, name in (
        ("tolerations", "tolerations"),
        ("affinity", "affinity"),
        ("node_selector", "nodeSelector"),
        ("priority_class", "priorityClassName"),
        ("host_network", "hostNetwork"),
        ("grace_seconds", "terminationGracePeriodSeconds"),
    ):
        assert spec[name] == EVERYTHING[key], key
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    (spread,) = spec["topologySpreadConstraints"]
    assert spread["labelSelector"] == {"matchLabels": {"dask.org/workergroup-name": "run-gpus"}}
    assert spec["securityContext"]["runAsUser"] == 2000
    assert spec["runtimeClassName"] == "nvidia"  # by the patch
    sizes = {volume["name"]: volume.get("emptyDir") for volume in spec["volumes"]}
    assert sizes == {
        "tmp": {"sizeLimit": "102400Mi"},
        "shm": {"medium": "Memory", "sizeLimit": "16384Mi"},
        "models": None,
    }
    (container,) = spec["containers"]
    assert container["tty"] is True
    for part in ("requests", "limits"):
        assert container["resources"][part]["rdma/hca_shared_devices_a"] == "1"
        assert container["resources"][part]["ephemeral-storage"] == "102400Mi"
    assert container["volumeMounts"][-1] == EVERYTHING["volume_mounts"][0]
    # A call that runs may end before the worker is told to: all of the grace period but 30 s.
    assert container["lifecycle"]["preStop"]["exec"]["command"][-2:] == ["idle", "570"]
    scheduler = pods.dask_cluster(with_everything(), "run", None)["spec"]["scheduler"]["spec"]
    assert "tolerations" not in scheduler  # a pool's own


def test_a_worker_that_hangs_is_started_again() -> None:
    group = pods.worker_group(with_everything(liveness_seconds=600), "run", "cpu", {})
    (container,) = group["spec"]["worker"]["spec"]["containers"]
    live, start = container["livenessProbe"], container["startupProbe"]
    assert live["exec"]["command"][-2:] == ["engines.clusters.pod_probe", "health"]
    assert live["periodSeconds"] * live["failureThreshold"] == 600
    assert start["periodSeconds"] * start["failureThreshold"] == 300  # cluster.start_timeout
    assert "engines.clusters.pod_probe" in container["args"]  # --preload: it writes its port
    never = pods.worker_group(with_everything(liveness_seconds=0), "run", "cpu", {})
    assert "livenessProbe" not in never["spec"]["worker"]["spec"]["containers"][0]


def test_a_gang_of_kueue() -> None:
    wanted = with_everything(gang={"kind": "kueue", "queue": "team"})
    for pool in wanted.pools:
        group = pods.worker_group(wanted, "run", pool, {})
        check(group)
        meta = group["spec"]["worker"]["metadata"]
        assert meta["labels"]["kueue.x-k8s.io/queue-name"] == "team"
        assert meta["labels"]["kueue.x-k8s.io/pod-group-name"] == "run"
        assert meta["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "3"  # 2 gpus, 1 cpu
    # The scheduler starts before them and is not counted.
    assert "metadata" not in pods.dask_cluster(wanted, "run", None)["spec"]["scheduler"]


def test_a_gang_of_coscheduling(api: type[Api]) -> None:
    wanted = with_everything(gang={"kind": "coscheduling"})
    group = pods.worker_group(wanted, "run", "cpu", {})["spec"]["worker"]
    assert group["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "run"
    assert group["spec"]["schedulerName"] == "scheduler-plugins-scheduler"
    started = kubernetes.start(wanted, {"gpus": {}, "cpu": {}}, None)
    root = "/apis/scheduling.x-k8s.io/v1alpha1/namespaces/rl/podgroups"
    (made,) = [one for one in api.objects.values() if one["kind"] == "PodGroup"]
    assert made["spec"] == {"minMember": 3, "scheduleTimeoutSeconds": 600}
    assert started.remote is not None
    started.remote.close()
    assert ("delete", f"{root}/{made['metadata']['name']}") in api.seen
    assert api.objects == {}


def test_settings_of_a_pool_that_is_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cluster.kubernetes.pools.gpu is of no pool"):
        config(kubernetes={"image": "i", "tls_secret": "t", "pools": {"gpu": {}}})


def test_shared_memory_counts_to_the_pods_memory() -> None:
    pools = {"gpus": {"shared_memory_gib": 64}}
    with pytest.raises(ValueError, match="shared_memory_gib = 64 counts to"):
        config(kubernetes={"image": "i", "tls_secret": "t", "pools": pools})


def test_names_of_pods_are_checked() -> None:
    with pytest.raises(ValueError, match="lower-case"):
        config(pools={"GPU_a": PoolConfig()}, roles=one_pool_roles("GPU_a"))


def dependents(resource: pods.Resource) -> Iterator[tuple[str, pods.Resource]]:
    """What Dask's operator makes of a resource, each with its collection in the API.

    Labels, names and variables as dask-kubernetes 2026.3.0 has them (operator/controller, BSD-3-Clause);
    tests/deploy/test_dask_operator.py compares them with that package's.
    """
    name, spec = resource["metadata"]["name"], resource["spec"]
    labels = dict(resource["metadata"]["labels"])
    if resource["kind"] == "DaskCluster":
        part = spec["scheduler"]
        labels |= part.get("metadata", {}).get("labels", {})
        labels |= {"dask.org/cluster-name": name, "dask.org/component": "scheduler"}
        service = {"name": f"{name}-scheduler", "labels": labels, "annotations": {}}
        yield "api/v1/services", {
            "apiVersion": "v1", "kind": "Service", "metadata": service, "spec": part["service"],
        }  # fmt: skip
        yield "apis/apps/v1/deployments", deployment(f"{name}-scheduler", labels, part)
    elif resource["kind"] == "DaskWorkerGroup":
        labels |= spec["worker"].get("metadata", {}).get("labels", {})
        labels |= {"dask.org/cluster-name": spec["cluster"], "dask.org/workergroup-name": name}
        labels |= {"dask.org/component": "worker"}
        for number in range(spec["worker"]["replicas"]):
            worker = f"{name}-worker-{number:010x}"
            made = deployment(worker, labels, spec["worker"])
            (container,) = made["spec"]["template"]["spec"]["containers"]
            address = f"tcp://{spec['cluster']}-scheduler.rl.svc.cluster.local:8786"
            container["env"] = [
                *container["env"],
                {"name": "DASK_WORKER_NAME", "value": worker},
                {"name": "DASK_SCHEDULER_ADDRESS", "value": address},
            ]
            yield "apis/apps/v1/deployments", made


def deployment(name: str, labels: dict[str, str], part: pods.Resource) -> pods.Resource:
    labels = {**labels, "sidecar.istio.io/inject": "false"}
    annotations = part.get("metadata", {}).get("annotations", {})
    meta = {"name": name, "labels": labels, "annotations": annotations}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta,
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": meta, "spec": copy.deepcopy(part["spec"])},
        },
    }


class Api(BaseHTTPRequestHandler):
    """As much of Kubernetes' API as a cluster's life takes, with what Dask's operator does meanwhile.

    What it makes of a resource goes when the resource does.
    """

    seen: ClassVar[list[tuple[str, str]]]
    objects: ClassVar[dict[str, Any]]  # by path
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
        path = f"{self.path}/{resource['metadata']['name']}"
        self.seen.append(("create", f"{self.path} {resource['metadata']['name']}"))
        self.objects[path] = resource
        for collection, made in dependents(resource):
            fits(made)
            made["owner"] = path
            group, _, kind = collection.rpartition("/")
            self.objects[f"/{group}/namespaces/rl/{kind}/{made['metadata']['name']}"] = made
        self.answer(201, resource)

    def do_DELETE(self) -> None:
        self.seen.append(("delete", self.path))
        gone = self.objects.pop(self.path, None)
        for path, made in list(self.objects.items()):
            if made.get("owner") == self.path:
                del self.objects[path]
        self.answer(200 if gone else 404, {"kind": "Status", "status": "Success"})

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Api]]:
    pytest.importorskip("kr8s")

    class Fresh(Api):
        seen: ClassVar = []
        objects: ClassVar = {}

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
    kinds = Counter(made["kind"] for made in api.objects.values())
    assert kinds == {
        "DaskCluster": 1, "DaskWorkerGroup": 2, "Service": 1, "Deployment": 1 + 2 + 1,
    }  # fmt: skip
    (service,) = (made for made in api.objects.values() if made["kind"] == "Service")
    chosen = service["spec"]["selector"].items()
    reached = [
        made["metadata"]["name"]
        for made in api.objects.values()
        if made["kind"] == "Deployment"
        and chosen <= made["spec"]["template"]["metadata"]["labels"].items()
    ]
    assert reached == [f"{name}-scheduler"]
    api.seen.clear()
    assert started.remote is not None
    started.remote.close()
    assert [path.rpartition("/")[2] for what, path in api.seen if what == "delete"] == [
        f"{name}-cpu",
        f"{name}-gpus",
        name,
    ]
    assert api.objects == {}  # nothing is left


def test_a_refusal_is_one_sentence(api: type[Api]) -> None:
    api.refuse = True
    with pytest.raises(ValueError, match=r"Kubernetes refused DaskCluster .*not allowed"):
        kubernetes.start(config(), {"gpus": {}, "cpu": {}}, None)
