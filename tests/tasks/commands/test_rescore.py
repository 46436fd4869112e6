"""Which reward a rescoring is by."""

from __future__ import annotations

import pytest

from configs.rewards import FunctionReward, JudgeReward, MathReward, RewardsConfig
from tasks.commands.rescore import reward_of

JUDGE = JudgeReward(name="referee", url="http://host/v1", model="m", rubric="rubric.md")
OWN = RewardsConfig(functions=[JUDGE, FunctionReward(path="mine:length", name="math")])


def test_a_reward_is_named_by_the_run_or_by_its_definition() -> None:
    assert reward_of("referee", OWN) is JUDGE
    assert reward_of("math", OWN) is OWN.functions[1]
    assert reward_of("math", RewardsConfig(functions=[JUDGE])) == MathReward()
    assert reward_of("other:length", OWN) == FunctionReward(path="other:length")


def test_a_word_that_names_none_is_told_what_does() -> None:
    with pytest.raises(ValueError, match="or the name of one of the run's rewards: referee, math"):
        reward_of("refere", OWN)
