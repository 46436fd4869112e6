"""Workers as pods: a DaskCluster and a group for each pool, created and removed through kr8s.

Dask's operator (dask-kubernetes) has to run in the Kubernetes cluster. The flow runs in a pod
too (infra/kubernetes/run.yaml), because it talks to the scheduler's service; its pod owns the
DaskCluster, so that nothing outlives a flow that was killed.
"""

from __future__ import annotations

import functools
import math
import posixpath
import uuid
from collections.abc import Mapping
from typing import Any

from configs.cluster import (
    ClusterConfig,
    CoschedulingGang,
    KubernetesPods,
    KubernetesPool,
    KueueGang,
    PoolConfig,
    TlsFiles,
)
from configs.environment import own_pod
from engines.clusters.opening import Environments, StartedCluster
from engines.clusters.pods import (
    Resource,
    gibibytes,
    grace_seconds,
    joined,
    merge_patch,
    metadata,
    pod_spec,
)
from engines.processes.dask_settings import Certificates
from engines.processes.process_setup import C_LIBRARIES
from engines.workers.cluster import RemoteWorkers

API = "kubernetes.dask.org/v1"
PORT = 8786  # of the scheduler
HTTP_PORT = 8787  # of its health page
IDLE_TIMEOUT = 3600  # seconds without a call after which the operator removes a forgotten cluster
DEATH_TIMEOUT = 300  # seconds that a worker looks for the scheduler
PROBE = ("python", "-P", "-m", "engines.clusters.pod_probe")
PROBE_SECONDS = 25  # for an answer: Python's start and that of the page
ENDING_SECONDS = 30  # of the grace period, for the worker to end once no call holds it

KINDS = {
    "DaskCluster": "daskclusters",
    "DaskWorkerGroup": "daskworkergroups",
    "PodGroup": "podgroups",
}


def start(
    config: ClusterConfig, env: Environments, certificates: Certificates | None
) -> StartedCluster:
    """Create the resources; the scheduler and the workers come up meanwhile."""
    name = f"refrain-{uuid.uuid4().hex[:8]}"
    pods = Pods()
    try:
        owner = own_pod()
        pods.create(dask_cluster(config, name, owner))
        if isinstance(config.kubernetes.gang, CoschedulingGang):
            pods.create(pod_group(config, config.kubernetes.gang, name, owner))
        for pool in config.pools:
            pods.create(worker_group(config, name, pool, env[pool]))
    except BaseException:
        pods.close()
        raise
    return StartedCluster(address=scheduler_address(config, name), remote=pods)


class Pods(RemoteWorkers):
    """What was created in Kubernetes.

    A pod that is evicted is replaced by its deployment, the operator keeps the groups at their size,
    and pods have the certificates from a secret.
    """

    def __init__(self) -> None:
        self._created: list[Any] = []  # kr8s' objects

    def create(self, resource: Resource) -> None:
        """Create a resource; ValueError with what Kubernetes says against it."""
        import kr8s
        from kr8s.objects import new_class

        kind = resource["kind"]
        cls = new_class(
            kind=kind, version=resource["apiVersion"], namespaced=True, plural=KINDS[kind]
        )
        item = cls(resource, namespace=resource["metadata"]["namespace"])
        try:
            item.create()
        except (kr8s.ServerError, kr8s.NotFoundError) as error:
            raise ValueError(
                f"Kubernetes refused {kind} {item.name}: {error}. Is what defines it installed "
                "(Dask's operator; scheduler-plugins for a PodGroup), and may this service account "
                "create it (refrain kubernetes render)?"
            ) from error
        self._created.append(item)

    def close(self) -> None:
        """Remove what was created, workers first."""
        import kr8s

        while self._created:
            item = self._created.pop()
            try:
                item.delete(propagation_policy="Background")
            except kr8s.NotFoundError:  # its owner is gone already
                continue


def scheduler_address(config: ClusterConfig, name: str) -> str:
    """Address of the scheduler's service."""
    protocol = "tls" if isinstance(config.encryption, TlsFiles) else "tcp"
    return f"{protocol}://{name}-scheduler.{config.kubernetes.namespace}.svc:{PORT}"


def dask_cluster(config: ClusterConfig, name: str, owner: Mapping[str, str] | None) -> Resource:
    """The DaskCluster: its scheduler, and a default group without workers.

    `owner`: name and uid of the pod with whose end the cluster is removed.
    """
    container = {
        "name": "scheduler",
        "image": config.kubernetes.image,
        "args": [
            "python", "-P", "-m", "engines.clusters.scheduler", "--host", "0.0.0.0",
            "--port", str(PORT), "--dashboard-address", f":{HTTP_PORT}", *_tls_options(config),
        ],
        "env": [
            {
                "name": "DASK_DISTRIBUTED__SCHEDULER__NO_WORKERS_TIMEOUT",
                "value": f"{config.no_workers_timeout:g}s",
            }
        ],
        "ports": [
            {"name": "tcp-comm", "containerPort": PORT, "protocol": "TCP"},
            {"name": "http-dashboard", "containerPort": HTTP_PORT, "protocol": "TCP"},
        ],
        "readinessProbe": {"httpGet": {"port": "http-dashboard", "path": "/health"}},
        "livenessProbe": {
            "httpGet": {"port": "http-dashboard", "path": "/health"},
            "periodSeconds": 30,
            "timeoutSeconds": 10,
            "failureThreshold": 20,
        },
        "volumeMounts": tls_mounts(config),
    }  # fmt: skip
    service = {
        "type": "ClusterIP",
        "selector": {"dask.org/cluster-name": name, "dask.org/component": "scheduler"},
        "ports": [
            {"name": "tcp-comm", "port": PORT, "targetPort": "tcp-comm", "protocol": "TCP"},
            {
                "name": "http-dashboard",
                "port": HTTP_PORT,
                "targetPort": "http-dashboard",
                "protocol": "TCP",
            },
        ],
    }
    empty = {"name": "worker", "image": config.kubernetes.image, "args": ["true"]}
    return {
        "apiVersion": API,
        "kind": "DaskCluster",
        "metadata": _owned(config, name, owner),
        "spec": {
            "idleTimeout": IDLE_TIMEOUT,
            "worker": {"replicas": 0, "spec": {"containers": [empty]}},
            "scheduler": {
                **_metadata(metadata(config.kubernetes)),
                "spec": _pod(config, config.kubernetes, container, tls_volumes(config)),
                "service": service,
            },
        },
    }


def worker_group(config: ClusterConfig, name: str, pool: str, env: Mapping[str, str]) -> Resource:
    """The DaskWorkerGroup of a pool."""
    workers = config.pools[pool]
    pods = joined(config.kubernetes, config.kubernetes.pools.get(pool, KubernetesPool()))
    variables = {
        **C_LIBRARIES,
        "OMP_NUM_THREADS": str(workers.threads),
        "MKL_NUM_THREADS": str(workers.threads),
        **env,
    }
    container = {
        "name": "worker",
        "image": config.kubernetes.image,
        "args": [
            "python", "-P", "-m", "engines.clusters.worker", scheduler_address(config, name),
            "--name", "$(DASK_WORKER_NAME)", "--nthreads", str(workers.slots + 1),
            "--resources", f"{pool}={workers.slots}", "--death-timeout", str(DEATH_TIMEOUT),
            "--local-directory", "/tmp", "--preload", PROBE[-1], *_tls_options(config),
        ],
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "resources": _resources(config, workers),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, *tls_mounts(config)],
        **_probes(config),
    }  # fmt: skip
    if (patience := grace_seconds(pods) - ENDING_SECONDS) > 0:
        words = [*PROBE, "idle", str(patience)]
        container["lifecycle"] = {"preStop": {"exec": {"command": words}}}
    if config.kubernetes.secret is not None:
        container["envFrom"] = [{"secretRef": {"name": config.kubernetes.secret}}]
    shm = {
        "name": "shm",  # the default of 64 MiB is too small for engines of several processes
        "emptyDir": {"medium": "Memory", "sizeLimit": gibibytes(pods.shared_memory_gib)},
    }
    group = f"{name}-{pool}"
    return {
        "apiVersion": API,
        "kind": "DaskWorkerGroup",
        "metadata": {
            "name": group,
            "namespace": config.kubernetes.namespace,
            "labels": {"app.kubernetes.io/name": "refrain", "dask.org/cluster-name": name},
        },
        "spec": {
            "cluster": name,
            "worker": {
                "replicas": workers.workers,
                **_metadata(merge_patch(metadata(pods), _gang_metadata(config, name))),
                "spec": _pod(
                    config,
                    pods,
                    container,
                    [shm, *tls_volumes(config)],
                    {"dask.org/workergroup-name": group},
                ),
            },
        },
    }


def pod_group(
    config: ClusterConfig, gang: CoschedulingGang, name: str, owner: Mapping[str, str] | None
) -> Resource:
    """The PodGroup of all workers, by which the plugin Coscheduling starts them together."""
    return {
        "apiVersion": "scheduling.x-k8s.io/v1alpha1",
        "kind": "PodGroup",
        "metadata": _owned(config, name, owner),
        "spec": {"minMember": _workers(config), "scheduleTimeoutSeconds": gang.timeout},
    }


def _gang_metadata(config: ClusterConfig, name: str) -> Resource:
    """Labels and annotations by which a worker's pod belongs to the others of its cluster."""
    match config.kubernetes.gang:
        case KueueGang(queue=queue):
            return {
                "labels": {
                    "kueue.x-k8s.io/queue-name": queue,
                    "kueue.x-k8s.io/pod-group-name": name,
                },
                "annotations": {"kueue.x-k8s.io/pod-group-total-count": str(_workers(config))},
            }
        case CoschedulingGang():
            return {"labels": {"scheduling.x-k8s.io/pod-group": name}}
    return {}


def _workers(config: ClusterConfig) -> int:
    return sum(pool.workers for pool in config.pools.values())


def _owned(config: ClusterConfig, name: str, owner: Mapping[str, str] | None) -> Resource:
    """Metadata of a resource that goes with the pod `owner`, if there is one."""
    fields: Resource = {
        "name": name,
        "namespace": config.kubernetes.namespace,
        "labels": {"app.kubernetes.io/name": "refrain"},
    }
    if owner is not None:
        fields["ownerReferences"] = [
            {"apiVersion": "v1", "kind": "Pod", "name": owner["name"], "uid": owner["uid"]}
        ]
    return fields


def _metadata(fields: Resource) -> Resource:
    return {"metadata": fields} if fields else {}


def _probes(config: ClusterConfig) -> Resource:
    """A worker that does not answer is started again: after its time to start, or a long while."""
    seconds = config.kubernetes.liveness_seconds
    if not seconds:
        return {}
    asks = {"exec": {"command": [*PROBE, "health"]}, "timeoutSeconds": PROBE_SECONDS}
    return {
        "startupProbe": {
            **asks,
            "periodSeconds": 10,
            "failureThreshold": math.ceil(config.start_timeout / 10),
        },
        "livenessProbe": {
            **asks,
            "periodSeconds": 60,
            "failureThreshold": math.ceil(seconds / 60),
        },
    }


def _pod(
    config: ClusterConfig,
    pods: KubernetesPods,
    container: Resource,
    volumes: list[Resource],
    same_pods: Mapping[str, str] | None = None,
) -> Resource:
    pod, more = pod_spec(pods, container, volumes, same_pods), Resource()
    if config.kubernetes.service_account is not None:
        more["serviceAccountName"] = config.kubernetes.service_account
    if same_pods and isinstance(config.kubernetes.gang, CoschedulingGang):
        more["schedulerName"] = config.kubernetes.gang.scheduler
    patches = [config.kubernetes.patch, *([pods.patch] if pods is not config.kubernetes else [])]
    return functools.reduce(merge_patch, patches, more | pod)


def _resources(config: ClusterConfig, workers: PoolConfig) -> Resource:
    limits = {config.kubernetes.gpu_resource: str(workers.gpus)} if workers.gpus else {}
    requests = {"cpu": str(workers.threads), **limits}
    if workers.memory_gib is not None:
        memory = f"{round(workers.memory_gib * 1024)}Mi"
        limits["memory"] = requests["memory"] = memory
    return {"requests": requests, "limits": limits}


def _tls_options(config: ClusterConfig) -> list[str]:
    tls = config.encryption
    if not isinstance(tls, TlsFiles):
        return []
    files = ["--tls-ca-file", tls.ca_file, "--tls-cert", tls.cert, "--tls-key", tls.key]
    return ["--protocol", "tls", *files]


def tls_mounts(config: ClusterConfig) -> list[Resource]:
    """Where the certificates are in a container, where there are any."""
    tls = config.encryption
    if not isinstance(tls, TlsFiles):
        return []
    return [{"name": "tls", "mountPath": posixpath.dirname(tls.ca_file), "readOnly": True}]


def tls_volumes(config: ClusterConfig) -> list[Resource]:
    """The volume of the certificates, where there are any."""
    if not isinstance(config.encryption, TlsFiles):
        return []
    return [{"name": "tls", "secret": {"secretName": config.kubernetes.tls_secret}}]
