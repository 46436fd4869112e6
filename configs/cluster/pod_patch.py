"""What a patch of a pod's spec may say: containers by their names, entries of lists by their keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from configs.cluster.kinds import KubernetesConfig

# By which entries of a list are told apart, as `kubectl patch` does; other lists are replaced.
LIST_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
}
ADDED_LISTS = ("tolerations", "envFrom")  # whose entries are added to those that there are
PROGRAMS = ("worker", "scheduler", "flow")  # containers of the pods


def patch_sentence(kubernetes: KubernetesConfig) -> str:
    """What is wrong with the first patch that cannot be meant so; empty where none is."""
    place = "cluster.kubernetes"
    faults = [*_faults(f"{place}.patch", kubernetes.patch, PROGRAMS)]
    faults += _faults(f"{place}.flow.patch", kubernetes.flow.patch, ("flow",))
    for name, pool in kubernetes.pools.items():
        faults += _faults(f"{place}.pools.{name}.patch", pool.patch, ("worker",))
    return next(iter(faults), "")


def _faults(place: str, patch: Any, programs: Sequence[str]) -> Iterator[str]:
    """programs: containers that the pods may have."""
    for field, value in patch.items() if isinstance(patch, dict) else ():
        below = f"{place}.{field}"
        if field == "containers" and not isinstance(value, list):
            yield f"{below} would leave the pod without its program. Write a list, or remove it."
        if field not in LIST_KEYS or not isinstance(value, list):
            yield from _faults(below, value, programs)
            continue
        key = LIST_KEYS[field]
        for number, entry in enumerate(value):
            if not isinstance(entry, dict) or not isinstance(entry.get(key), str | int):
                yield f"{below}.{number} has no {key}, by which entries are merged. Set it."
                continue
            if field in ("containers", "initContainers"):
                own = programs if field == "containers" else ()
                yield from _foreign(below, str(entry[key]), "image" in entry, own)
            yield from _faults(f"{below}.{number}", entry, programs)


def _foreign(place: str, name: str, image: bool, programs: Sequence[str]) -> Iterator[str]:
    """A container that the pods do not have, where it is no whole one, or called almost as theirs."""
    if name in programs:
        return
    if near := difflib.get_close_matches(name.lower(), programs, n=1):
        yield f"{place} has {name}. Did you mean {near[0]}? Call another container less like it."
    elif not image:
        own = f", and that of these pods is {' or '.join(programs)}" if programs else ""
        yield f"{place} has {name} without an image{own}. Give it an image, or the pods' own name."
