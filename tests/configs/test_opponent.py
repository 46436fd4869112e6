"""Settings of an opponent: what fits together, and what is refused in a sentence."""

from __future__ import annotations

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe

PLAYED = (
    "episodes={environment: {kind: class, path: 'games.py:Game'}, players: 2, opponent: {}}",
    "rewards.functions=[{kind: environment}]",
)


def settings(*words: str) -> GRPOConfig:
    return load_recipe(GRPOConfig, "tiny", [*PLAYED, *words])


def test_its_engines_are_a_role_of_their_own() -> None:
    config = settings()
    assert config.sampling_roles == ["rollout", "opponent"]
    assert config.cluster.roles.pool_of("opponent") == config.cluster.roles.rollout
    pools = "cluster.pools.games={workers: 1}"
    apart = settings(pools, "cluster.roles.opponent=games")
    assert "games" in apart.used_pools
    assert settings(pools, "episodes.opponent=null").sampling_roles == ["rollout"]


def test_its_samples_are_not_counted_among_those_that_train() -> None:
    config = settings()
    assert config.samples_per_step == 2 * config.trained_per_step
    alone = settings("episodes.opponent=null")
    assert alone.samples_per_step == alone.trained_per_step == config.samples_per_step


@pytest.mark.parametrize("version", ["start", "run-1", "run-1@12", "models:/name@champion"])
def test_versions_are_named_as_elsewhere(version: str) -> None:
    found = settings(f"episodes.opponent.version={version}").opponent
    assert found is not None and found.version == version


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["episodes.players=1"],
            r"episodes\.players = 1 has only one\. Set episodes\.players to 2",
        ),
        (["episodes.opponent.policy_plays=2"], r"policy_plays = 2 is no player: .* from 0 to 1"),
        (["episodes.opponent.policy_plays=first"], r"policy_plays"),
        (["episodes.opponent.version=run@0"], r"episodes\.opponent\.version"),
        (
            ["cluster.share_devices=true", "cluster.roles.rollout=train"],
            r"episodes\.opponent do not give their devices back\. Set cluster\.share_devices = false",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(*words)
