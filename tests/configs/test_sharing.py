"""What cluster.share_devices can be together with."""

from __future__ import annotations

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe

SHARED = ("cluster.share_devices=true", "cluster.roles.rollout=train")


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(GRPOConfig, "tiny", list(words))
    return str(caught.value)


def test_roles_start_in_an_order() -> None:
    kl = "algorithm.kl.coefficient=0.1"
    assert load_recipe(GRPOConfig, "tiny", [*SHARED, kl]).engine_roles == [
        "rollout",
        "ref",
        "actor",
    ]


def test_nothing_to_share_is_refused() -> None:
    said = refused("cluster.share_devices=true")
    assert "no two roles share a pool (rollout on rollout, actor on train)" in said
    assert "Set cluster.roles.rollout = train" in said


def test_steps_that_overlap_are_refused_only_where_they_would_wait() -> None:
    stale = ("max_staleness=1", "algorithm.correction=[{kind: truncate}]")
    said = refused(*SHARED, *stale)
    assert "max_staleness = 1 samples while another step trains" in said
    assert "Set max_staleness = 0" in said
    apart = ("cluster.share_devices=true", "algorithm.kl.coefficient=0.1", *stale)
    assert load_recipe(GRPOConfig, "tiny", list(apart)).max_staleness == 1


def test_vllms_own_switch_is_refused() -> None:
    assert "Set cluster.share_devices instead" in refused(
        "rollout.engine_args={enable_sleep_mode: true}"
    )
