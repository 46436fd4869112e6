"""The built-in scorers: reasoning-gym's own, and math answers by math-verify.

Each takes one completion and its data row and returns a score, None where it has no opinion, or a
score with columns to store beside it. The scorer of code is engines/rewards/unit_tests.py.
They run in a reward process (engines/rewards/child.py), never in a worker.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from configs.data import ReasoningGymSource
from configs.rewards import ChoiceReward, EnvironmentReward, MathReward, ReasoningGymReward
from engines.rewards.boxes import boxes_of
from engines.rewards.protocol import SampleScore
from storage.objects.json_values import Row, unpack
from storage.prompts.datasets import ReasoningGymRows

Scorer: TypeAlias = Callable[[str, Row], "float | SampleScore | None"]

_INTEGER = re.compile(r"[-+]?\d+(?:,\d{3})*")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

# A letter as answers write it: C, (C), **C**, $C$, \(C\), \text{(C)}, \mathrm{C}.
_OPENING = r"(?:[\s*_`(\[{$]|\\[(\[]|\\(?:text|math)[a-z]*(?=\s*\{)|\\mbox(?=\{))*"
_CLOSING = r"(?:[\s*_`)\]}$]|\\[)\]])*"
_END = rf"{_CLOSING}[.,;:!]?{_CLOSING}"
_ALONE = re.compile(rf"{_OPENING}([A-Za-z]){_END}")
_WITH_ITS_CHOICE = re.compile(rf"{_OPENING}([A-Z])\s*[.):]{_CLOSING}\s.*")  # C. Paris
_RUN = re.compile(r"([\s*_`(){}\[\]$])\1{2,}")
_IS = r"(?:\s+(?:is|was|(?:should|must|would|will|has\s+to)\s+be)\b\s*:?|\s*[*_`\"]*\s*[:=])"
_OPTION = r"(?:(?:option|choice|letter)\b\s*)?"
# A capital is a letter, though not I of "I think"; a small one in brackets or at the end of a line.
_STATED = (
    rf"{_OPENING}(?:([A-HJ-Z])\b|(I)\b(?!['\u2019]|\s+[a-z])|(?<=[(*{{])([a-z])(?=[)*}}])"
    rf"|([a-z])(?={_END}(?:\n|$)))"
)
# What else tells the letter, the most explicit first.
_LETTERS = (
    re.compile(
        r"(?i:\b(?:answer|(?:correct|right|best)\s+(?:option|choice|one)))"
        rf"(?i:{_IS})\s*(?i:{_OPTION}){_STATED}"
    ),
    re.compile(r"\b([A-Z])\b[*)\]]*\s+is\s+(?:the\s+)?(?:correct|right|best)\b"),
    re.compile(rf"(?i:\b(?:answer|choice|option))(?i:{_IS})?{_STATED}"),
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

    None when there is no reference answer. math-verify 0.9's own time limits report a time-out as a
    wrong answer (not reported there), so they are off: the reward process limits each sample's time.
    """
    from engines.rewards.math_answers import answers, reference_of

    def score(completion: str, row: Row) -> float | None:
        reference = reference_of(reference_text(reward, row))
        return None if reference is None else float(answers(completion, reference))

    return score


def reference_reader(reward: MathReward | ChoiceReward) -> Scorer:
    """Of a row's reference: 1 where it scores itself as what it means, else 0; None for no reference.

    0: it is text to `math`, which no other way to write it equals, or no letter to `choice`.
    """
    if isinstance(reward, ChoiceReward):
        return lambda _, row: float(_letter_in(str(row[reward.answer_column])) is not None)
    from engines.rewards.math_answers import reference_of

    def read(completion: str, row: Row) -> float | None:
        reference = reference_of(reference_text(reward, row))
        return None if reference is None else float(reference.readable)

    return read


def reference_text(reward: MathReward, row: Row) -> str:
    """The reference answer as the row has it, without what stands before it."""
    text = str(row[reward.answer_column])
    return text if reward.answer_after is None else text.rpartition(reward.answer_after)[2]


def letter_of(completion: str) -> str | None:
    """The letter that a completion answers with, as a capital; None where it tells none.

    That is the last letter in a box, else in answer tags, else after "the answer is", else the last
    that is called right, an option, or stands on a line by itself.
    """
    completion = _RUN.sub(r"\1\1", completion)  # a long run would be tried in every part
    told = [[box.content for box in boxes_of(completion)], _ANSWER_TAG.findall(completion)]
    for contents in told:
        letters = [letter for one in contents if (letter := _letter_in(one)) is not None]
        if letters:
            return letters[-1]
    for form in _LETTERS:
        if matches := list(form.finditer(completion)):
            return _group(matches[-1])
    lines = [match for line in completion.splitlines() if (match := _ALONE.fullmatch(line.strip()))]
    return _group(lines[-1]) if lines else _letter_in(completion)


def _letter_in(text: str) -> str | None:
    """The letter that is all of a text, but for the choice that it names: C of (C) Paris."""
    match = _ALONE.fullmatch(text.strip()) or _WITH_ITS_CHOICE.fullmatch(text.strip())
    return None if match is None else _group(match)


def _group(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).upper()


def choice_scorer(reward: ChoiceReward) -> Scorer:
    """1 when the completion's letter is the reference's, else 0; None where that is no letter."""

    def score(completion: str, row: Row) -> float | None:
        reference = _letter_in(str(row[reward.answer_column]))
        return None if reference is None else float(letter_of(completion) == reference)

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
