"""Rewards of your own, with TRL's signature: the right number in the answer, and brevity.

    refrain grpo own.yaml      # where rewards.functions.0.path is reward.py:right_number

A reward process imports this file, and nothing of Refrain is needed here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

NUMBER = re.compile(r"-?\d+")


def right_number(
    completions: list[str],
    answer: list[int | None],  # the column `answer` of the rows, one entry per completion
    trainer_state: Any,
    log_metric: Callable[[str, float], None],
    log_extra: Callable[[str, list[Any]], None],
    **others: Any,  # prompts, completion_ids and the other columns
) -> list[float | None]:
    """1 for a completion with the right number in it, 0.1 for one with any number, else 0.

    None where a row has no answer: this reward does not apply, and the sample has the others'. An
    exception would make the samples `failed`, which never train.
    """
    numbers = [NUMBER.findall(text) for text in completions]
    log_extra("numbers", numbers)
    log_metric("share_with_a_number", sum(map(bool, numbers)) / len(numbers))
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    return [
        None if right is None else 1.0 if str(right) in found else 0.1 * bool(found)
        for right, found in zip(answer, numbers, strict=True)
    ]


def brevity(completions: list[str], **others: Any) -> list[float]:
    """1 for an empty completion, half of that at 8 characters."""
    return [8 / (8 + len(text)) for text in completions]
