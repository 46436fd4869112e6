"""Where reward models live."""

from __future__ import annotations

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe

LEARNED = "rewards.functions=[{kind: reward_model, model: some/where}]"


def test_on_the_pool_of_rewards_unless_they_have_their_own() -> None:
    config = load_recipe(GRPOConfig, "tiny", [LEARNED])
    assert config.cluster.roles.pool_of("reward_model") == config.cluster.roles.reward
    own = ["cluster.roles.reward_model=judges", "cluster.pools.judges={workers: 2}"]
    assert "judges" in load_recipe(GRPOConfig, "tiny", [LEARNED, *own]).used_pools
    assert "judges" not in load_recipe(GRPOConfig, "tiny", own).used_pools


def test_devices_that_are_had_in_turn_are_not_for_them() -> None:
    shared = ["cluster.share_devices=true", "cluster.roles.rollout=train"]
    load_recipe(GRPOConfig, "tiny", [LEARNED, *shared])
    with pytest.raises(ConfigError, match=r"Set cluster\.roles\.reward_model to another pool"):
        load_recipe(GRPOConfig, "tiny", [LEARNED, *shared, "cluster.roles.reward_model=train"])
