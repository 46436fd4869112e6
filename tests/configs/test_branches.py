"""Settings that do not go with episodes that branch are refused in one sentence."""

from __future__ import annotations

import re

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from configs.rules.rule import check_rules

AGENT = "episodes={environment: {kind: agent, path: tests.flows.agents:ask}}"
ANSWERS = "episodes={environment: {kind: class, path: examples.guess:Guess}}"


def refused(words: list[str], flow: type[GRPOConfig] = GRPOConfig, recipe: str = "tiny") -> str:
    """The sentence with which a new run is refused; empty where it is not."""
    try:
        check_rules(load_recipe(flow, recipe, words), new_run=True)
    except (ConfigError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("advantage", "said"),
    [
        ("{kind: optimal_token_baseline}", "goes from each token .* Set algorithm.advantage.kind"),
        ("{kind: reinforce, gamma: 0.9}", "gamma = 0.9 goes .* Set algorithm.advantage.gamma = 1"),
        ("{kind: reinforce_plus_plus, gamma: 0.9}", "gamma = 0.9 goes from each token to the next"),
        ("{kind: reinforce}", ""),
        ("{kind: gigpo}", ""),
        ("{kind: rloo}", ""),
    ],
    ids=str,
)
def test_advantages_that_go_along_one_path_are_refused(advantage: str, said: str) -> None:
    words = [f"algorithm.advantage={advantage}"]
    found = refused([AGENT, *words])
    assert re.search(said, found) if said else not found
    assert refused([ANSWERS, *words]) == "", "of one path they are what they were"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([AGENT, "episodes.max_tokens=4"], "one of them has up to rollout.max_new_tokens"),
        ([ANSWERS, "episodes.max_tokens=4000"], "these episodes have one. Set it to null"),
        (
            [AGENT, "episodes.max_tokens=4000", "algorithm.shaping.overlong={buffer: 4}"],
            "Set algorithm.shaping.overlong.max_tokens",
        ),
    ],
)
def test_max_tokens_is_of_episodes_that_branch(words: list[str], said: str) -> None:
    assert said in refused(words)


def test_the_longest_sample_is_an_episode_with_all_its_branches() -> None:
    config = load_recipe(GRPOConfig, "tiny", [AGENT])
    assert config.longest_response == config.rollout.max_new_tokens
    config = load_recipe(GRPOConfig, "tiny", [AGENT, "episodes.max_tokens=4000"])
    assert config.longest_response == 4000


PAID = "rewards.functions=[{kind: environment}]"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([AGENT, PAID], ""),
        ([ANSWERS, PAID], "is about agents that branch"),
        ([AGENT, PAID, "episodes.branches=false"], "is about agents that branch"),
        ([AGENT, PAID, "algorithm.advantage={kind: gigpo}"], "kind = gigpo compares otherwise"),
        (
            [AGENT, PAID, "algorithm.advantage={kind: grpo, normalize: batch}"],
            "kind = grpo compares otherwise",
        ),
        ([AGENT, "rewards.functions=[{kind: environment, weight: 2}]"], "with weight 1"),
    ],
)
def test_credit_by_branch_is_within_groups(words: list[str], said: str) -> None:
    found = refused([*words, "episodes.credit=branch"])
    assert said in found if said else found == ""


def test_routing_replay_takes_conversations_that_grow() -> None:
    experts = ["train.router_replay=true", "rollout.engine=transformers"]
    assert "Set train.router_replay = false" in refused([AGENT, *experts])


@pytest.mark.parametrize("players", ["players: 2", "sees: frames"])
def test_a_rendered_past_is_of_one_players_text(players: str) -> None:
    words = (
        f"episodes={{environment: {{kind: class, path: a:b}}, past_turns: as_rendered, {players}}}"
    )
    assert "is about one player's text" in refused([words])


def test_without_branches_discounts_are_what_they_were() -> None:
    assert (
        refused(
            [AGENT, "episodes.branches=false", "algorithm.advantage={kind: reinforce, gamma: 0.9}"]
        )
        == ""
    )
