"""The built-in scorers: reasoning-gym's own, and math answers by math-verify.

Each takes one completion and its data row and returns a score, None where it has no opinion, or a
score with columns to store beside it. The scorer of code is engines/rewards/unit_tests.py.
They run in a reward process (engines/rewards/child.py), never in a worker.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TypeAlias

from configs.data import ReasoningGymSource
from configs.rewards import ChoiceReward, EnvironmentReward, MathReward, ReasoningGymReward
from engines.rewards.boxes import boxes_of
from engines.rewards.protocol import SampleScore, SampleTookTooLong
from storage.objects.documents import Row, unpack
from storage.prompts.datasets import ReasoningGymRows

Scorer: TypeAlias = Callable[[str, Row], "float | SampleScore | None"]

_EXPENSIVE = 0.5  # seconds of CPU time, of which an honest answer takes some hundredths
_INTEGER = re.compile(r"[-+]?\d+(?:,\d{3})*")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)

# A letter as answers write it: C, (C), **C**, $C$, \(C\), \text{(C)}, \mathrm{C}.
_OPENING = (
    r"(?:[\s*_`(\[{<$\"']|\\[(\[]|\\(?:text|math)[a-z]*(?=\s*\{)|\\mbox(?=\{)"
    r"|\\(?:rm|bf|it|sf|tt)(?![a-z]))*"
)
_CLOSING = r"(?:[\s*_`)\]}>$\"']|\\[)\] ])*"
_END = rf"{_CLOSING}[.,;:!]?{_CLOSING}"
_ALONE = re.compile(rf"{_OPENING}([A-Za-z]){_END}")
# C. Paris, (C)\ 12, C - Paris
_WITH_ITS_CHOICE = re.compile(
    rf"{_OPENING}([A-Z])[*_]*(?:\s*[.):]|\s*\}}[.):]|\s+-){_CLOSING}(?:(?<=[\s\}}])|(?<=\.)(?=[A-Z][a-z])).*"
)
# Full-width letters and signs, and other quotation marks and dashes, as the ones above.
_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {
    0x2018: 0x27, 0x2019: 0x27, 0x201C: 0x22, 0x201D: 0x22,
    0x2013: 0x2D, 0x2014: 0x2D, 0x3002: 0x2E, 0x3000: 0x20,
}  # fmt: skip
# Another letter beside one, which ends the clause: A or B.
_ANOTHER = re.compile(
    rf"{_CLOSING}(?:,\s*(?:and|or)\b|,|/|&|\b(?:and|or)\b)\s*(?i:(?:option|choice)\s+)?{_OPENING}"
    rf"[A-Z]\b{_CLOSING}(?=[.,;:!?]|$|\n|(?:because|since|as|but)\b)"
)
_HTML = re.compile(r"</?(?:b|strong|i|em|u|p)>", re.IGNORECASE)
_RUN = re.compile(r"([\s*_`(){}\[\]$])\1{2,}")
_IS = (
    r"(?:\s+(?:is|was|(?:should|must|would|will|has\s+to)\s+be)\b\s*:?|\s*(?:[-=]>|\u2192)"
    r"|\s*[*_`\"']*\s*[:=]|\s+-(?=\s))"
)
_OPTION = r"(?:(?:the\s+)?(?:option|choice|letter)\b\s*)?"
# What the answer is not, before what it is: not (A) but
_NOT = (
    rf"(?:(?i:not)\s+(?i:{_OPTION}){_OPENING}[A-Z]\b{_CLOSING},?"
    r"\s*(?i:but(?:\s+(?:rather|instead))?)\s+)?"
)
# A capital is a letter, though not I of "I think"; a small one in brackets or at the end of a line.
_STATED = (
    rf"{_OPENING}(?:([A-HJ-Z])\b|(I)\b(?!['\u2019]|\s+[a-z])|(?<=[(*{{])([a-z])(?=[)*}}])"
    rf"|([a-z])(?={_END}(?:\n|$)))"
)
# What else tells the letter, the most explicit first.
_LETTERS = (
    re.compile(
        r"(?i:\b(?:answer|(?:correct|right|best)\s+(?:option|choice|one))(?:\s+to\s+(?:this|the)\s+\w+)?)"
        rf"(?i:{_IS})\s*{_NOT}(?i:{_OPTION}){_STATED}"
    ),
    re.compile(
        r"\b([A-Z])\b[*)\]]*\s+is\s+(?:the\s+)?(?:correct|right|best|(?<=the )(?:final )?answer)\b"
    ),
    re.compile(rf"(?i:\b(?:answer|choice|option))(?i:{_IS})?{_STATED}"),
    re.compile(
        r"(?i:\b(?:I|we)(?:\s+(?:would|will)|'d|'ll)?\s+(?:choose|chose|pick|select|say|go\s+with)"
        r"|(?:^|\n)\s*(?:choose|pick|select)\b|\bit(?:\s+must\s+be|\s+is|'s)\b|\b(?:correct|solution)\s*:"
        r"|(?:\u7b54\u6848|\u6b63\u786e\u9009\u9879)\s*(?:\u662f|\u9009|\u4e3a)?\s*:?"
        r"|r\u00e9ponse\s*(?:(?:correcte\s+)?est(?:\s+la)?\b|:)|antwort\s*(?:(?:ist|lautet)\b|:)"
        r"|respuesta\s*(?:(?:correcta\s+)?es(?:\s+la)?\b|:))"
        rf"\s*(?i:{_OPTION}){_OPENING}([A-Z])(?![A-Za-z'])"
    ),
    re.compile(rf"(?i:\b(?:so|thus|hence|therefore)\b),?\s*{_OPENING}(?-i:([A-Z])){_END}(?:\n|$)"),
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
    An answer that uses it up, such as a tower of powers, is worth 0; where the machine was busy with
    something else the sample is failed.
    """
    from engines.rewards.math_answers import answers, reference_of

    def score(completion: str, row: Row) -> float | None:
        reference = reference_of(reference_text(reward, row))
        started = time.process_time()
        try:
            return None if reference is None else float(answers(completion, reference))
        except SampleTookTooLong:
            if time.process_time() - started < _EXPENSIVE:
                raise
            return 0.0

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

    What follows a thought counts. That is the last letter in a box, else in answer tags, else after
    "the answer is", else the last that is called right, an option, chosen, or stands on a line by
    itself. Of "A or B" it tells none.
    """
    # A long run would be tried in every part.
    completion = _RUN.sub(r"\1\1", _HTML.sub("", completion.translate(_WIDE)))
    _, closed, answer = completion.rpartition("</think>")
    if closed and answer.strip():  # a thought is no answer
        completion = answer
    places = [[box.content for box in boxes_of(completion)], _ANSWER_TAG.findall(completion)]
    for contents in places:
        letters = [letter for content in contents if (letter := _letter_in(content)) is not None]
        if letters:
            return letters[-1]
    for form in _LETTERS:
        if matches := list(form.finditer(completion)):
            several = _ANOTHER.match(completion, _end_of_letter(matches[-1]))
            return None if several else _group(matches[-1])
    lines = [
        match for line in completion.splitlines() if (match := _ALONE.fullmatch(line.strip(" \t#")))
    ]
    return _group(lines[-1]) if lines else _letter_in(completion)


def _letter_in(text: str) -> str | None:
    """The letter that is all of a text, but for the choice that it names: C of (C) Paris."""
    text = text.translate(_WIDE).strip()
    match = _ALONE.fullmatch(text) or _WITH_ITS_CHOICE.fullmatch(text)
    return None if match is None else _group(match)


def _end_of_letter(match: re.Match[str]) -> int:
    return next(match.end(n) for n in range(1, len(match.groups()) + 1) if match[n] is not None)


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
        score_of_episode = row.get("episode_reward")
        return None if score_of_episode is None else float(str(score_of_episode))

    return score


def share_of_digits(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """Share of each completion's characters that are digits, in [0, 1]; a task for tiny models."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def begins_with_digit(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """1 for a completion that begins with a digit, else 0: right or wrong, for tiny models."""
    return [float(text[:1].isdigit()) for text in completions]
