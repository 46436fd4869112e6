"""Rules between the parts of settings: which are asked when, and of what they speak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from configs.rules.rule import Rule, check_rules, of_each, where

SMALL: Rule[Numbers] = of_each(
    lambda settings: settings.numbers,
    needs=lambda settings, number: number < settings.bound,
    says=lambda settings, number: f"{number} is not below {settings.bound}.",
)
SOME: Rule[Numbers] = Rule(
    needs=lambda settings: len(settings.numbers) > 0,
    says=lambda settings: "There are none.",
    new_runs_only=True,
)


@dataclass
class Numbers:
    numbers: tuple[int, ...]
    bound: int = 10
    rules: ClassVar[tuple[Rule[Any], ...]] = (SOME, SMALL)


def test_the_first_part_that_breaks_a_rule_is_named() -> None:
    check_rules(Numbers((1, 9)))
    with pytest.raises(ValueError, match=r"^12 is not below 10\.$"):
        check_rules(Numbers((1, 12, 11)))


def test_a_rule_of_new_runs_is_asked_of_them_alone() -> None:
    check_rules(Numbers(()))
    with pytest.raises(ValueError, match="There are none"):
        check_rules(Numbers(()), new_run=True)
    check_rules(Numbers((12,)), new_run=True)  # the others were asked when they were read


def test_rules_of_some_settings_leave_others_alone() -> None:
    (rule,) = where(lambda settings: settings.bound > 5, SMALL)
    assert rule.fault(Numbers((7,), bound=3)) is None
    assert rule.fault(Numbers((7,), bound=6)) == "7 is not below 6."
    assert where(lambda settings: True, SOME)[0].new_runs_only


class Doubtful(GRPOConfig):
    """Settings with a rule that is newer than runs that were stored."""

    rules: ClassVar[tuple[Rule[Any], ...]] = (
        *GRPOConfig.rules,
        Rule[GRPOConfig](
            needs=lambda config: config.steps < 50,
            says=lambda config: f"steps = {config.steps} are many. Set steps below 50.",
            new_runs_only=True,
        ),
    )


def test_settings_of_a_flow_add_rules_of_their_own() -> None:
    stored = load_recipe(Doubtful, "tiny", ["steps=60"])
    assert Doubtful.model_validate(stored.model_dump(mode="json")) == stored
    with pytest.raises(ValueError, match="steps = 60 are many"):
        check_rules(stored, new_run=True)
    with pytest.raises(ConfigError, match=r"rollout\.shards = 9 is more than prompts_per_step"):
        load_recipe(Doubtful, "tiny", ["rollout.shards=9", "prompts_per_step=4"])
