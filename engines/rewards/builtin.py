"""The built-in scorers: reasoning-gym's own, and math answers by math-verify.

Each takes one completion and its data row and returns a score, None where it has no opinion, or a
score with columns to store beside it. The scorer of code is engines/rewards/unit_tests.py.
They run in a reward process (engines/rewards/child.py), never in a worker.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import TypeAlias

from configs.data import ReasoningGymSource
from configs.rewards import ChoiceReward, EnvironmentReward, MathReward, ReasoningGymReward
from engines.rewards.protocol import SampleScore
from storage.objects.json_values import Row, unpack
from storage.prompts.datasets import ReasoningGymRows

Scorer: TypeAlias = Callable[[str, Row], "float | SampleScore | None"]

_INTEGER = re.compile(r"[-+]?\d+(?:,\d{3})*")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# What a completion ends with when it answers with a letter, the most explicit first.
_LETTERS = (
    re.compile(r"\\boxed\{\s*(?:\\text(?:bf)?\{)?\s*\(?([A-Z])\)?\s*\}"),
    re.compile(r"<answer>\s*\(?([A-Z])\)?\s*[.:]?\s*</answer>"),
    re.compile(r"(?i:answer|choice|option)(?i:\s+is)?\s*:?\s*[*(]*([A-Z])\b"),
    re.compile(r"^\s*[*(]*([A-Z])[*)]*[.:]?\s*$", re.MULTILINE),
)


def extract(completion: str, part: str) -> str | None:
    """The part of a completion that counts as its answer; None when there is no such part."""
    if part == "whole":
        return completion.strip()
    if part == "answer_tag":
        answers = _ANSWER_TAG.findall(completion)
        return answers[-1].strip() if answers else None
    pattern = _INTEGER if part == "last_integer" else _NUMBER
    numbers = pattern.findall(completion)
    return numbers[-1].replace(",", "").removeprefix("+") if numbers else None


def reasoning_gym_scorer(reward: ReasoningGymReward, source: ReasoningGymSource) -> Scorer:
    """The score that the task gives to the extracted answer; 0 when the completion has none.

    ValueError when there is no such task or it refuses its parameters.
    """
    rows = ReasoningGymRows(source)
    rows.rows([0])  # some parameters are refused only when a problem is made
    problems = rows.problems

    def score(completion: str, row: Row) -> float:
        answer = extract(completion, reward.extract)
        if answer is None:
            return 0.0
        entry = {**row, "metadata": unpack(str(row["metadata"]))}
        return float(problems.score_answer(answer, entry))

    return score


def math_scorer(reward: MathReward) -> Scorer:
    """1 when math-verify finds the completion equal to the reference answer, else 0.

    None when the reference answer itself is no mathematics. math-verify 0.9's own time limits report
    a time-out as a wrong answer (not reported there), so they are off: the reward process limits
    each sample's time.
    """
    from math_verify import parse, verify

    for module in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(module).setLevel(logging.ERROR)  # it warns that the limits are off

    def score(completion: str, row: Row) -> float | None:
        reference = str(row[reward.answer_column])
        if reward.answer_after is not None:
            reference = reference.rpartition(reward.answer_after)[2]
        reference = reference.strip()
        gold = parse(reference, parsing_timeout=None) or parse(
            f"${reference}$", parsing_timeout=None
        )
        if not gold:
            return None
        answer = parse(completion, parsing_timeout=None)
        return float(verify(gold, answer, timeout_seconds=None))

    return score


def letter_of(completion: str) -> str | None:
    """The letter that a completion answers with: the last of the most explicit form that it has."""
    for form in _LETTERS:
        if found := form.findall(completion):
            return str(found[-1])
    return None


def choice_scorer(reward: ChoiceReward) -> Scorer:
    """1 when the completion's letter is the reference's, else 0; None where that is no letter."""

    def score(completion: str, row: Row) -> float | None:
        reference = str(row[reward.answer_column]).strip().strip("().").upper()
        if len(reference) != 1 or not reference.isalpha():
            return None
        return float(letter_of(completion) == reference)

    return score


def environment_scorer(reward: EnvironmentReward) -> Scorer:
    """What the episode's environment gave, all turns together; None where it gave nothing."""

    def score(completion: str, row: Row) -> float | None:
        given = row.get("episode_reward")
        return None if given is None else float(str(given))

    return score


def share_of_digits(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """Share of each completion's characters that are digits, in [0, 1]; a task for tiny models."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def begins_with_digit(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """1 for a completion that begins with a digit, else 0: right or wrong, for tiny models."""
    return [float(text[:1].isdigit()) for text in completions]
