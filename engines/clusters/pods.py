"""The spec of a pod by the settings: what all pods of Refrain have, a pool's own, and a patch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from configs.cluster import ADDED_LISTS, LIST_KEYS, PROGRAMS, KubernetesPods

Resource = dict[str, Any]  # as Kubernetes' API takes it
Pods = TypeVar("Pods", bound=KubernetesPods)

USER = 1000  # of the image
GRACE_SECONDS = 120
TMP = "/tmp"


def joined(common: KubernetesPods, pool: Pods) -> Pods:
    """A pool's settings, with those of all pods added, patches not: the pool's own go before them."""
    merged: dict[str, Any] = {}
    for name in KubernetesPods.model_fields:
        base, more = dict(common)[name], dict(pool)[name]
        if name == "patch":  # one after the other, since each may remove things
            merged[name] = more
        elif isinstance(more, dict):
            merged[name] = {**base, **more}
        elif isinstance(more, list):
            merged[name] = [*base, *more]
        elif name == "host_network":
            merged[name] = base or more
        else:
            merged[name] = base if more is None else more
    return pool.model_copy(update=merged)


def pod_spec(
    pods: KubernetesPods,
    container: Resource,
    volumes: Sequence[Resource] = (),
    same_pods: Mapping[str, str] | None = None,
) -> Resource:
    """The spec of a pod with one container, without patches.

    Args:
        pods: What it shall have, complete (`joined`).
        container: Name, image, args and whatever else is the program's own.
        volumes: Of the program.
        same_pods: Labels of the pods among which topology_spread counts, where it names none.
    """
    spec: Resource = {
        "containers": [_container(pods, container)],
        "volumes": [_tmp(pods), *volumes, *pods.volumes],
        "automountServiceAccountToken": False,  # model text and reward code run here
        "terminationGracePeriodSeconds": grace_seconds(pods),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user(pods),
            "runAsGroup": user(pods),
            "fsGroup": user(pods),  # of the volumes' files
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    optional = {
        "nodeSelector": dict(pods.node_selector),
        "tolerations": list(pods.tolerations),
        "affinity": dict(pods.affinity),
        "topologySpreadConstraints": [
            {"labelSelector": {"matchLabels": dict(same_pods or {})}, **constraint}
            for constraint in pods.topology_spread
        ],
        "priorityClassName": pods.priority_class,
        "imagePullSecrets": [{"name": name} for name in pods.image_pull_secrets],
        "hostNetwork": pods.host_network,
        "dnsPolicy": "ClusterFirstWithHostNet" if pods.host_network else None,
    }
    return spec | {name: value for name, value in optional.items() if value}


def user(pods: KubernetesPods) -> int:
    """User id of the programs."""
    return pods.run_as_user or USER


def grace_seconds(pods: KubernetesPods) -> int:
    """Seconds between being told to end and being killed."""
    return pods.grace_seconds or GRACE_SECONDS


def metadata(pods: KubernetesPods) -> Resource:
    """Labels and annotations of the pods, where there are any."""
    parts = {"labels": dict(pods.labels), "annotations": dict(pods.annotations)}
    return {name: value for name, value in parts.items() if value}


def _container(pods: KubernetesPods, program: Resource) -> Resource:
    read_only = pods.read_only_root is not False
    container = {
        **program,
        "volumeMounts": [
            {"name": "tmp", "mountPath": TMP},
            *program.get("volumeMounts", []),
            *pods.volume_mounts,
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": read_only,
            "capabilities": {
                "drop": ["ALL"],
                **({"add": add} if (add := pods.capabilities) else {}),
            },
        },
    }
    env = list(program.get("env", []))
    if read_only and "HOME" not in {variable["name"] for variable in env}:
        env.append({"name": "HOME", "value": TMP})  # caches of libraries are below it
    container["env"] = env
    more = dict(pods.resources)
    if pods.ephemeral_storage_gib is not None:
        more["ephemeral-storage"] = gibibytes(pods.ephemeral_storage_gib)
    if more:
        resources = program.get("resources", {})
        container["resources"] = {
            part: {**resources.get(part, {}), **more} for part in ("requests", "limits")
        }
    return container


def _tmp(pods: KubernetesPods) -> Resource:
    size = pods.ephemeral_storage_gib
    return {"name": "tmp", "emptyDir": {"sizeLimit": gibibytes(size)} if size else {}}


def gibibytes(size: float) -> str:
    """A size in GiB as Kubernetes writes it, to the MiB."""
    return f"{round(size * 1024)}Mi"


def merge_patch(target: Any, patch: Any) -> Any:
    """A JSON merge patch (RFC 7396) that merges lists as `kubectl patch` does, by LIST_KEYS.

    An entry whose other keys are all null removes the one of its name, a container aside. Entries of
    ADDED_LISTS are added. A program's container that the target lacks is another pod's. The arguments
    stay as is.
    """
    if isinstance(patch, list):
        return [merge_patch(None, entry) for entry in patch]
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        before = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, list) and key in LIST_KEYS:
            merged[key] = _merge_list(key, before or [], value)
        elif isinstance(value, list) and key in ADDED_LISTS:
            merged[key] = [
                *(before or []),
                *(entry for entry in value if entry not in (before or [])),
            ]
        else:
            merged[key] = merge_patch(before, value)
    return merged


def _merge_list(field: str, target: list[Any], patch: list[Any]) -> list[Any]:
    key = LIST_KEYS[field]
    if not all(isinstance(entry, dict) and key in entry for entry in [*target, *patch]):
        return [merge_patch(None, entry) for entry in patch]  # of a stored run; no new one has it
    merged = {entry[key]: entry for entry in target}
    for entry in patch:
        name, values = entry[key], [value for label, value in entry.items() if label != key]
        if field == "containers" and name in PROGRAMS and name not in merged:
            continue
        if field != "containers" and values and all(value is None for value in values):
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), entry)
    return list(merged.values())
