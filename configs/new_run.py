"""What is asked of the settings of a run that begins, and what a person is told of those that go on.

`tasks.run.preflight` asks before anything starts. A stored run is read, and goes on, without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from configs.grpo import GRPOConfig
from configs.rollout import RolloutConfig
from configs.rules.logprobs import MASK, WHOLE, cut_by
from configs.rules.rule import check_rules

_LARGEST = 2**63 - 1  # of a column of whole numbers


def check_new_run(config: GRPOConfig) -> None:
    """ValueError, one sentence, where no run may begin with these settings."""
    check_rules(config, new_run=True)


def warnings_of(config: GRPOConfig) -> list[str]:
    """What a person should know of settings that are allowed, or with which a stored run goes on."""
    return [*_bias(config.rollout), *_early_end(config), *_idle(config)]


def _bias(rollout: RolloutConfig) -> list[str]:
    cut = cut_by(rollout)
    if not cut or rollout.sampling_mask:
        return []
    return [
        f"{cut} draws from a part of the policy's distribution, and the policy is trained as if from "
        "the whole: the gradient is biased, and more so as the part gets smaller. Set "
        f"{MASK} = true, or {WHOLE}, unless that is wanted."
    ]


def _idle(config: GRPOConfig) -> list[str]:
    if config.train.recompute == "all" or config.train.gradient_checkpointing:
        return []
    return [
        f"train.recompute = {config.train.recompute} is about layers that "
        "train.gradient_checkpointing names, and that is 0: nothing is computed again. Set "
        "train.gradient_checkpointing = true."
    ]


def _early_end(config: GRPOConfig) -> list[str]:
    if all(one.environment.kind != "agent" for one in config.played.values()):
        return []
    if config.rewards.on_failure != "drop" or config.group_size == 1:
        return []
    return [
        "an agent that raises fails its episode, and rewards.on_failure = drop leaves out the whole "
        "group; a step without a whole group ends the run. Set rewards.on_failure = complete to "
        "train on the other episodes of a group."
    ]


def check_finite(config: GRPOConfig) -> None:
    """ValueError where a number of the settings is NaN or infinite, or too large for the stores."""
    for name, number in _numbers(config.model_dump(), ""):
        if isinstance(number, int):
            if abs(number) > _LARGEST:
                raise ValueError(
                    f"{name} = {number} is beyond {_LARGEST}, the largest number that can be stored. "
                    "Set a smaller one."
                )
            continue
        if not math.isfinite(number):
            raise ValueError(f"{name} = {number}, which is no finite number. Set it to one.")


def _numbers(value: Any, name: str) -> Iterator[tuple[str, int | float]]:
    """All numbers of plain settings, by their dotted names."""
    if isinstance(value, int | float):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _numbers(inner, f"{name}.{number}")
