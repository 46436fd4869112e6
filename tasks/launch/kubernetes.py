"""The manifests of a run on Kubernetes: those of infra/kubernetes with what the settings say.

The run's settings travel in a ConfigMap. Which pods its workers are is said by
engines/clusters/kubernetes.py, once the flow runs.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import yaml

from configs.cluster import METADATA, KubernetesConfig, NetworkDestination, lies_in, patch_sentence
from configs.credentials import credential_sentence
from configs.flows import program
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError, read_settings
from configs.storage import StoreConfig
from engines.clusters.kubernetes import tls_mounts, tls_volumes
from engines.clusters.pods import Resource, gibibytes, joined, merge_patch, metadata, pod_spec

INFRA = Path(str(files("infra"))) / "kubernetes"
SETTINGS_FOLDER = "/etc/refrain"
HOME = "/home/refrain"  # working folder of the image
# Of a Job, and so of the run: its pods have it as a label and with a suffix as their name.
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")
LOCAL_TRACKING = ("sqlite:", "file:", "/", ".")


def render(config: GRPOConfig, module: str, name: str) -> list[Resource]:
    """What one run needs, in the order in which it is created.

    Args:
        config: Settings of the run, as read: what nobody has set is decided in the flow's pod.
        module: Of the flow, such as flows.grpo.
        name: Of the run, the Job and the ConfigMap.

    Raises ConfigError for settings with which the run could not begin, or would leave nothing.
    """
    _check(config, name)
    kubernetes = config.cluster.kubernetes
    resources = [*_read("rbac.yaml"), *_network(config), _settings(config, name)]
    resources.append(_job(config, module, name))
    for resource in resources:
        resource["metadata"]["namespace"] = kubernetes.namespace
    return resources


def as_yaml(resources: list[Resource]) -> str:
    """Them as kubectl takes them."""
    return str(
        yaml.dump_all(resources, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    )


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as people do."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def words_of(path: str) -> list[str]:
    """The settings of a values file as words of a command line, key=value. Raises ConfigError."""
    return list(_words(read_settings(Path(path))))


def local_files(config: GRPOConfig) -> list[str]:
    """Files of this machine that the settings name; the image has to have them too."""
    paths = {text.partition(":")[0] for text in _texts(config.model_dump(mode="json"))}
    return sorted(path for path in paths if path.startswith("/") and os.path.isfile(path))


def _words(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        inner = isinstance(value, dict) and value and not any("." in str(name) for name in value)
        if inner:
            yield from _words(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value)}"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _check(config: GRPOConfig, name: str) -> None:
    cluster, kubernetes = config.cluster, config.cluster.kubernetes
    mounted = kubernetes.volume_mounts + kubernetes.flow.volume_mounts
    local = _is_local(config.store)
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name} cannot be a Job's name. Use up to 52 lower-case letters, digits and "
            "hyphens."
        )
    if cluster.kind != "kubernetes":
        raise ConfigError(
            f"cluster.kind = {cluster.kind}, and these manifests are for Kubernetes. Set "
            "cluster.kind=kubernetes."
        )
    if fault := credential_sentence(config) or patch_sentence(kubernetes):
        raise ConfigError(fault)  # a ConfigMap would show credentials
    if local and not mounted:
        raise ConfigError(
            f"store.uri = {config.store.uri} is a folder of the flow's pod alone. Set store.uri to "
            "a bucket (s3://…), or mount a shared volume by cluster.kubernetes.volume_mounts."
        )
    if not local and not kubernetes.destinations:
        raise ConfigError(
            f"cluster.kubernetes.destinations is empty, so workers could not reach "
            f"{config.store.uri}. Set it to the networks of the store and of what else they ask: "
            "cluster.kubernetes.destinations=[{cidr: 10.20.0.0/16, ports: [443]}]."
        )
    if config.tracking.uri.startswith(LOCAL_TRACKING):
        raise ConfigError(
            f"tracking.uri = {config.tracking.uri} would be lost with the flow's pod. Set "
            "tracking.uri to the address of an MLflow server."
        )
    if kubernetes.flow.prefect_api_url is None:
        raise ConfigError(
            "cluster.kubernetes.flow.prefect_api_url is not set, so the run's dashboard would be in "
            "its pod alone. Set it to the API of a Prefect server, http://HOST:4200/api."
        )


def _is_local(store: StoreConfig) -> bool:
    return store.uri.partition("://")[0] in ("file", "local", store.uri)


def _read(name: str) -> list[Resource]:
    return list(yaml.safe_load_all((INFRA / name).read_text()))


def _network(config: GRPOConfig) -> list[Resource]:
    """The policies of infra/kubernetes/network.yaml, with the places that the settings name."""
    kubernetes, port = config.cluster.kubernetes, config.tracking.prometheus_port
    closed, operator, flow = _read("network.yaml")
    closed["spec"]["egress"] += [_egress(destination) for destination in kubernetes.destinations]
    (source,) = operator["spec"]["ingress"][0]["from"]
    source["namespaceSelector"]["matchLabels"] = {
        "kubernetes.io/metadata.name": kubernetes.operator_namespace
    }
    if port is not None:  # whoever collects metrics
        flow["spec"]["ingress"] = [{"ports": [{"protocol": "TCP", "port": port}]}]
    return [closed, operator, flow]


def _egress(place: NetworkDestination) -> Resource:
    network = ip_network(place.cidr)
    block: Resource = {"cidr": place.cidr}
    if exceptions := [str(address) for address in METADATA if lies_in(address, network)]:
        block["except"] = exceptions
    ports = [{"protocol": "TCP", "port": port} for port in place.ports]
    return {"to": [{"ipBlock": block}], "ports": ports}


def _settings(config: GRPOConfig, name: str) -> Resource:
    settings = config.model_dump(mode="json", exclude_unset=True)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "refrain-flow"}},
        "data": {"run.yaml": yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)},
    }


def _job(config: GRPOConfig, module: str, name: str) -> Resource:
    kubernetes = config.cluster.kubernetes
    flow = kubernetes.flow
    pods = joined(kubernetes, flow)
    (job,) = _read("run.yaml")
    job["metadata"]["name"] = name
    spec = job["spec"]
    spec["backoffLimit"] = flow.retries
    spec["ttlSecondsAfterFinished"] = flow.keep_seconds
    if flow.deadline_seconds is not None:
        spec["activeDeadlineSeconds"] = flow.deadline_seconds
    template = spec["template"]
    template["metadata"] = merge_patch(metadata(pods), template["metadata"])
    volumes = [
        {"name": "settings", "configMap": {"name": name}},
        {"name": "refrain", "emptyDir": {}},
        *tls_volumes(config.cluster),
    ]
    pod = pod_spec(pods, _container(config, kubernetes, module, name), volumes)
    patches = [template["spec"], kubernetes.patch, flow.patch]
    template["spec"] = functools.reduce(merge_patch, patches, pod)
    return job


def _container(
    config: GRPOConfig, kubernetes: KubernetesConfig, module: str, name: str
) -> Resource:
    flow = kubernetes.flow
    size = {"cpu": f"{flow.threads:g}", "memory": gibibytes(flow.memory_gib)}
    container: Resource = {
        "name": "flow",
        "image": kubernetes.image,
        "args": [*program(module).split(), f"{SETTINGS_FOLDER}/run.yaml", "--name", name],
        "workingDir": HOME,
        "env": [
            {
                "name": "REFRAIN_POD_NAME",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
            },
            {"name": "REFRAIN_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
            {"name": "PREFECT_API_URL", "value": flow.prefect_api_url},
        ],
        "resources": {"requests": size, "limits": dict(size)},
        "livenessProbe": {
            "exec": {"command": ["refrain", "health"]},
            "periodSeconds": 60,
            "timeoutSeconds": 30,
            "failureThreshold": 10,
        },
        "volumeMounts": [
            {"name": "settings", "mountPath": SETTINGS_FOLDER, "readOnly": True},
            {"name": "refrain", "mountPath": f"{HOME}/.refrain"},
            *tls_mounts(config.cluster),
        ],
    }
    if kubernetes.secret is not None:
        container["envFrom"] = [{"secretRef": {"name": kubernetes.secret}}]
    return container
