"""Where reward models live, and how long scoring may take."""

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


def test_calls_that_wait_for_a_judge_are_not_hung() -> None:
    config = load_recipe(GRPOConfig, "tiny")
    assert config.scoring_deadline == config.rollout.deadline
    judge = "{kind: judge, url: 'http://h/v1', model: m, rubric: r.md, deadline: 50}"
    judged = load_recipe(GRPOConfig, "tiny", [f"rewards.functions=[{judge}]"])
    slots = judged.cluster.pools["cpu"].slots
    assert judged.scoring_deadline == judged.rollout.deadline + slots * 50
    own = "{kind: local_judge, name: N, model: m, rubric: r.md, deadline: 40}"
    both = ", ".join(own.replace("N", name) for name in ("one", "two"))
    local = load_recipe(GRPOConfig, "tiny", [f"rewards.functions=[{both}]"])
    assert local.scoring_deadline == local.rollout.deadline
    assert local.model_scoring_deadline == local.rollout.deadline + 80


def test_answers_are_compared_where_a_prompt_has_several() -> None:
    pairs = "rewards.functions=[{kind: reward_model, model: some/where, pairwise: {}}]"
    load_recipe(GRPOConfig, "tiny", [pairs])
    for word in ("group_size=1", "algorithm.advantage.kind=remax"):
        said = f"{word.replace('=', ' = ')} has prompts with one answer"
        with pytest.raises(ConfigError, match=said):
            load_recipe(GRPOConfig, "tiny", [pairs, word])
    with pytest.raises(ConfigError, match=r"has \{second\} 0 times"):
        load_recipe(GRPOConfig, "tiny", [pairs[:-3] + "template: '{prompt}{first}'}}]"])
