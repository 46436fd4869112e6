"""Which runs have engines of reward models, and which suites have some of their own."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from storage.objects.store import Store
from tasks.reward_models.role import REWARD_MODEL
from tasks.run.features import features_of
from tasks.run.roles import roles_of
from tasks.run.suite import Suite

MODEL = "rewards.functions=[{kind: reward_model, model: /nowhere}]"
SUITE = (
    "evaluation.suites.held.source={kind: reasoning_gym, task: leg_counting}",
    "evaluation.suites.held.rewards.functions=[{kind: reward_model, model: /nowhere}]",
)


def config_of(*words: str) -> GRPOConfig:
    return load_recipe(GRPOConfig, "tiny", list(words))


@pytest.mark.parametrize(
    ("words", "uses", "has"), [([], False, False), ([MODEL], True, True), ([*SUITE], True, False)]
)
def test_a_run_has_them_where_models_score(words: list[str], uses: bool, has: bool) -> None:
    config = config_of(*words)
    assert ("reward_models" in config.features) is uses
    assert (REWARD_MODEL in roles_of(config)) is has


def test_a_suite_has_those_of_its_own_rewards() -> None:
    config = config_of(*SUITE)
    assert config.evaluation is not None
    suite = Suite.of(config, "held", config.evaluation.suites["held"])
    (feature,) = features_of(suite.config)
    cluster: Any = Mock(config=config.cluster)
    for own, expected in ((suite.config, [REWARD_MODEL]), (config, [])):
        caller = Mock(config=own, cancelled=threading.Event())
        caller.files.run = "r"
        caller.files.store = Store("file:///nowhere")
        assert list(feature.of_suite(caller, cluster, "evaluation-held")) == expected


def test_models_are_looked_at_before_functions_are_loaded() -> None:
    (feature,) = features_of(config_of(MODEL))
    with pytest.raises(ValueError, match="/nowhere"):
        feature.check_rewards(config_of(MODEL).rewards)
