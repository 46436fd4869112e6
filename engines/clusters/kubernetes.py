"""Workers as pods: a DaskCluster and a group for each pool, created and removed through kr8s.

Dask's operator (dask-kubernetes) has to run in the Kubernetes cluster. The flow runs in a pod
too (infra/kubernetes/run.yaml), because it talks to the scheduler's service; its pod owns the
DaskCluster, so that nothing outlives a flow that was killed.
"""

from __future__ import annotations

import uuid
from typing import Any

from configs.cluster import ClusterConfig
from configs.environment import own_pod
from engines.certificates import Certificates
from engines.cluster import Cluster
from engines.clusters.opening import Environments, Started
from engines.clusters.pods import API, Resource, dask_cluster, scheduler_address, worker_group

KINDS = {"DaskCluster": "daskclusters", "DaskWorkerGroup": "daskworkergroups"}


def start(config: ClusterConfig, env: Environments, certificates: Certificates | None) -> Started:
    """Create the resources; the scheduler and the workers come up meanwhile."""
    name = f"refrain-{uuid.uuid4().hex[:8]}"
    pods = Pods()
    try:
        pods.create(dask_cluster(config, name, own_pod()))
        for pool in config.pools:
            pods.create(worker_group(config, name, pool, env[pool]))
    except BaseException:
        pods.close()
        raise
    return Started(address=scheduler_address(config, name), fleet=pods)


class Pods:
    """What was created in Kubernetes; the Fleet of a cluster there."""

    def __init__(self) -> None:
        self._created: list[Any] = []  # kr8s' objects

    def create(self, resource: Resource) -> None:
        """Create a resource; ValueError with what Kubernetes says against it."""
        import kr8s
        from kr8s.objects import new_class

        kind = resource["kind"]
        cls = new_class(kind=kind, version=API, namespaced=True, plural=KINDS[kind])
        made = cls(resource, namespace=resource["metadata"]["namespace"])
        try:
            made.create()
        except (kr8s.ServerError, kr8s.NotFoundError) as error:
            raise ValueError(
                f"Kubernetes refused {kind} {made.name}: {error}. Is Dask's operator installed, "
                "and may this service account create its resources (infra/kubernetes/)?"
            ) from error
        self._created.append(made)

    def leaving(self) -> frozenset[str]:
        """None: a pod that is evicted is replaced by its deployment."""
        return frozenset()

    def failure(self) -> str | None:
        """None: pods may still come."""
        return None

    def certificate_files(self) -> None:
        """None: pods have them from a secret."""

    def watch(self, cluster: Cluster) -> None:
        """Nothing: the operator keeps the groups at their size."""

    def close(self) -> None:
        """Remove what was created, workers first."""
        import kr8s

        while self._created:
            made = self._created.pop()
            try:
                made.delete(propagation_policy="Background")
            except kr8s.NotFoundError:  # its owner is gone already
                continue
