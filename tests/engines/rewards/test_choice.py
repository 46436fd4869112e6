"""The letter that a completion answers with."""

from __future__ import annotations

import pytest

from configs.rewards import ChoiceReward
from engines.rewards.builtin import choice_scorer, letter_of


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        (r"A is wrong, so is C. \boxed{B}", "B"),
        (r"\boxed{A} was too quick: \boxed{\text{D}}", "D"),
        (r"\boxed{(C)}", "C"),
        ("<answer> D </answer>", "D"),
        ("The answer is (B).", "B"),
        ("Answer: **C**", "C"),
        ("The correct choice is D", "D"),
        ("I think\n(A)\n", "A"),
        ("C.", "C"),
        (r"The answer is A, I mean \boxed{B}", "B"),
        ("A good question.", None),
        ("The answer is nothing", None),
        ("", None),
    ],
)
def test_the_letter(said: str, letter: str | None) -> None:
    assert letter_of(said) == letter


def test_the_score_is_none_where_the_reference_is_no_letter() -> None:
    score = choice_scorer(ChoiceReward())
    assert score(r"\boxed{B}", {"answer": "B"}) == 1.0
    assert score(r"\boxed{B}", {"answer": "(b)"}) == 1.0
    assert score("no idea", {"answer": "B"}) == 0.0
    assert score(r"\boxed{B}", {"answer": "42"}) is None
