"""Before a run: whether its rewards can be had, with their rows, code, sandboxes and judges."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from configs.data import DataConfig, ReasoningGymSource
from configs.judge import JudgeReward, Judging
from configs.reward_model import RewardModelReward
from configs.rewards import (
    ChoiceReward,
    EnvironmentReward,
    MathReward,
    ReasoningGymReward,
    RewardsConfig,
    UnitTestsReward,
)
from engines.rewards.judge import check_judge
from engines.rewards.judge_rubric import read_rubric
from engines.rewards.protocol import TRL_HIDDEN_COLUMNS
from engines.rewards.runner import RewardRunner
from engines.sandboxes.opening import prove
from storage.prompts.source import PromptSource


def check_rewards(
    rewards: RewardsConfig, data: DataConfig, source: PromptSource, given: Sequence[str] = ()
) -> None:
    """Prove before a run that rows hold prompts and what the rewards need; ValueError, one sentence.

    given: columns that the rows get on the way.

    A sandbox is started once, with a program in it. Users' functions and reasoning-gym are loaded in
    processes of their own, so nothing that they import comes into this one.
    """
    gym_source = isinstance(data.source, ReasoningGymSource)
    for reward in rewards.functions:
        if isinstance(reward, ReasoningGymReward) and not gym_source:
            raise ValueError(
                f"The reward {reward.label} scores reasoning-gym problems, and data.source.kind is "
                f"{data.source.kind}. Set data.source.kind = reasoning_gym, or another reward."
            )
    needed = [data.prompt_column]
    needed += [
        r.answer_column for r in rewards.functions if isinstance(r, MathReward | ChoiceReward)
    ]
    judges = [r for r in rewards.functions if isinstance(r, Judging)]
    named = itertools.chain(*(read_rubric(r.rubric).columns for r in judges))
    needed += [column for column in named if column not in given]
    for reward in rewards.functions:
        if isinstance(reward, UnitTestsReward):
            needed += reward.columns
    source.check_columns(dict.fromkeys(needed))
    for position, reward in enumerate(rewards.functions):
        if isinstance(reward, UnitTestsReward):
            prove(reward.sandbox, f"rewards.functions.{position}.sandbox")
    here = (
        MathReward,
        ChoiceReward,
        EnvironmentReward,
        Judging,
        RewardModelReward,
        UnitTestsReward,
    )
    loaded = [r for r in rewards.functions if not isinstance(r, here)]
    if gym_source and not any(isinstance(r, ReasoningGymReward) for r in loaded):
        loaded.append(ReasoningGymReward())  # its process proves the task and its parameters
    if loaded:
        _check_functions(
            rewards.model_copy(update={"functions": tuple(loaded)}), data, source, given
        )
    for reward in judges:  # last: a request costs something
        if isinstance(reward, JudgeReward):
            check_judge(reward)


def _check_functions(
    rewards: RewardsConfig, data: DataConfig, source: PromptSource, given: Sequence[str]
) -> None:
    """Load functions, and look whether the rows have the columns that each needs."""
    with RewardRunner(rewards, data) as runner:
        for reward, columns in zip(rewards.functions, runner.start(), strict=True):
            for column in columns:
                if column in TRL_HIDDEN_COLUMNS:
                    raise ValueError(
                        f"The reward {reward.label} takes {column}, which no function is given, "
                        f"whatever the columns of {source.name}: what was asked comes as prompts, "
                        "what was written as completions, one for each sample. Rename the "
                        "parameter, and a column that is meant by it."
                    )
                if column not in given and not source.has_column(column):
                    raise ValueError(
                        f"The reward {reward.label} needs a column '{column}'; the columns of "
                        f"{source.name} are: {', '.join(source.columns)}. Add the column, or set "
                        f"{column} among the params of this reward."
                    )
