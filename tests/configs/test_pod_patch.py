"""Patches of pods' specs: what cannot be meant so is refused before a run begins."""

from __future__ import annotations

import pytest

from configs.grpo import GRPOConfig, check_new_run
from configs.recipe import load_recipe


def config(word: str) -> GRPOConfig:
    return load_recipe(GRPOConfig, "tiny", [f"cluster.kubernetes.{word}"])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("pools.train.patch={containers: [{name: wroker, tty: true}]}",
         "pools.train.patch.containers has wroker. Did you mean worker?"),
        ("flow.patch={containers: [{name: Flow, image: a}]}", "containers has Flow. Did you mean flow?"),
        ("pools.train.patch={containers: [{name: flow, tty: true}]}",
         "has flow without an image, and that of these pods is worker. Give it an image"),
        ("patch={containers: [{name: side}]}",
         "has side without an image, and that of these pods is worker or scheduler or flow."),
        ("patch={initContainers: [{name: fetch}]}", "initContainers has fetch without an image."),
        ("patch={containers: [{tty: true}]}", "patch.containers.0 has no name, by which"),
        ("patch={containers: {worker: {}}}", "would leave the pod without its program"),
        ("patch={containers: null}", "would leave the pod without its program"),
        ("patch={containers: [{name: worker, volumeMounts: [{name: tmp}]}]}",
         "patch.containers.0.volumeMounts.0 has no mountPath, by which"),
        ("patch={volumes: [{emptyDir: {}}]}", "patch.volumes.0 has no name, by which"),
    ],
)  # fmt: skip
def test_a_patch_that_cannot_be_meant_so_is_refused(word: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        check_new_run(config(word))
    assert str(error.value).startswith("cluster.kubernetes.")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "word",
    [
        "patch={containers: [{name: worker, tty: true}, {name: flow, tty: true}]}",
        "patch={containers: [{name: shipper, image: logs:1}], runtimeClassName: nvidia}",
        "pools.train.patch={hostAliases: [{ip: 10.0.0.9, hostnames: [s3]}], priorityClassName: null}",
    ],
)
def test_other_patches_are_none_of_its_business(word: str) -> None:
    check_new_run(config(word))
