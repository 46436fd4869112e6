"""Where a trainer cannot send versions to the engines, one sentence says so."""

from __future__ import annotations

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe

TRAIN, ROLLOUT = "cluster.pools.train.gpus=1", "cluster.pools.rollout.gpus=1"
ON_ONE = "cluster.roles.rollout=train"


@pytest.mark.parametrize("way", ["ipc", "nccl"])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("lora={}",),
            "with lora a version is a small adapter. Set rollout.weight_transfer = store",
        ),
        (
            ("cluster.share_devices=true", ON_ONE),
            "cluster.share_devices = true gives these to one at a time",
        ),
        (("rollout.weight_transfer_timeout=200",), "rollout.deadline = 600 lets a call take"),
        ((TRAIN,), "cluster.pools.train.gpus = 1 where cluster.pools.rollout.gpus = 0"),
    ],
)
def test_refused(way: str, words: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(GRPOConfig, "tiny", [f"rollout.weight_transfer={way}", *words])
    assert says in str(caught.value)


def test_one_gpu_or_several() -> None:
    def refused(way: str, *words: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_recipe(GRPOConfig, "tiny", [f"rollout.weight_transfer={way}", *words])
        return str(caught.value)

    assert "Set rollout.weight_transfer = nccl" in refused("ipc", TRAIN, ROLLOUT)
    assert "Set rollout.weight_transfer = ipc" in refused("nccl", TRAIN, ON_ONE)
    for words in (("ipc", TRAIN, ON_ONE), ("nccl", TRAIN, ROLLOUT), ("ipc",), ("nccl",)):
        config = load_recipe(
            GRPOConfig, "tiny", [f"rollout.weight_transfer={words[0]}", *words[1:]]
        )
        assert config.rollout.weight_transfer == words[0]


def test_stored_runs_go_by_the_store() -> None:
    assert load_recipe(GRPOConfig, "tiny", []).rollout.weight_transfer == "store"
