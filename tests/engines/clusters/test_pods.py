"""The spec of a pod: what the settings add to it, and patches."""

from __future__ import annotations

from typing import Any

import pytest

from configs.cluster import KubernetesConfig, KubernetesPool, NetworkDestination
from engines.clusters.pods import joined, merge_patch, metadata, pod_spec

SPEC: dict[str, Any] = {
    "containers": [
        {
            "name": "worker",
            "image": "a",
            "env": [{"name": "A", "value": "1"}],
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
            "livenessProbe": {},
            "command": ["a"],
        }
    ],
    "volumes": [{"name": "tmp", "emptyDir": {}}],
    "priorityClassName": "low",
    "tolerations": [{"key": "a"}],
}


def test_a_patch_merges_lists_by_the_keys_of_their_entries() -> None:
    patch = {
        "containers": [
            {
                "name": "worker",
                "env": [{"name": "B", "value": "2"}, {"name": "A", "value": "3"}],
                "volumeMounts": [{"name": "tmp", "mountPath": "/var", "subPath": "var"}],
                "livenessProbe": None,
                "command": ["b"],
            },
            {"name": "side", "image": "b"},
            {"name": "flow", "tty": True},  # of the flow's pod
        ],
        "volumes": [{"name": "tmp", "emptyDir": None}, {"name": "new", "emptyDir": {}}],
        "priorityClassName": None,
        "tolerations": [{"key": "b"}, {"key": "a"}],
        "hostPID": False,
    }
    assert merge_patch(SPEC, patch) == {
        "containers": [
            {
                "name": "worker",
                "image": "a",
                "env": [{"name": "A", "value": "3"}, {"name": "B", "value": "2"}],
                "volumeMounts": [
                    {"name": "tmp", "mountPath": "/tmp"},
                    {"name": "tmp", "mountPath": "/var", "subPath": "var"},
                ],
                "command": ["b"],
            },
            {"name": "side", "image": "b"},
        ],
        "volumes": [{"name": "new", "emptyDir": {}}],
        "tolerations": [{"key": "a"}, {"key": "b"}],
        "hostPID": False,
    }
    assert SPEC["priorityClassName"] == "low"  # it is as it was


def test_a_stored_patch_whose_entries_have_no_names_replaces_the_list() -> None:
    assert merge_patch(SPEC, {"volumes": [{"emptyDir": {}}]})["volumes"] == [{"emptyDir": {}}]


def test_a_container_is_never_removed() -> None:
    patch = {"containers": [{"name": "worker", "livenessProbe": None}]}
    (container,) = merge_patch(SPEC, patch)["containers"]
    assert container["image"] == "a" and "livenessProbe" not in container


@pytest.mark.parametrize(
    ("target", "patch", "merged"),
    [  # of RFC 7396, appendix A
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_a_patch_is_one_of_the_standard(target: Any, patch: Any, merged: Any) -> None:
    assert merge_patch(target, patch) == merged


def test_a_pools_settings_are_added_to_those_of_all_pods() -> None:
    common = KubernetesConfig(
        annotations={"a": "all", "b": "all"},
        tolerations=[{"key": "all"}],
        priority_class="low",
        grace_seconds=60,
        host_network=True,
    )
    own = KubernetesPool(annotations={"b": "own"}, tolerations=[{"key": "own"}], grace_seconds=900)
    pods = joined(common, own)
    assert metadata(pods) == {"annotations": {"a": "all", "b": "own"}}
    spec = pod_spec(pods, {"name": "worker", "image": "i"})
    assert spec["tolerations"] == [{"key": "all"}, {"key": "own"}]
    assert spec["priorityClassName"] == "low"
    assert spec["terminationGracePeriodSeconds"] == 900
    assert spec["hostNetwork"] is True
    assert spec["dnsPolicy"] == "ClusterFirstWithHostNet"


def test_programs_are_not_root_and_write_to_volumes_alone() -> None:
    spec = pod_spec(KubernetesPool(), {"name": "worker", "image": "i"})
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"name": "HOME", "value": "/tmp"} in container["env"]
    writable = KubernetesPool(read_only_root=False, capabilities=["IPC_LOCK"])
    (container,) = pod_spec(writable, {"name": "worker", "image": "i"})["containers"]
    assert container["env"] == []
    assert container["securityContext"]["readOnlyRootFilesystem"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


@pytest.mark.parametrize("cidr", ["169.254.169.254/32", "169.254.0.0/16", "fd00:ec2::254/128"])
def test_addresses_that_hand_out_credentials_are_no_destination(cidr: str) -> None:
    with pytest.raises(ValueError, match="hand out credentials"):
        NetworkDestination(cidr=cidr)


def test_a_destination_is_a_network() -> None:
    with pytest.raises(ValueError, match="s3.example.org is no network"):
        NetworkDestination(cidr="s3.example.org")
