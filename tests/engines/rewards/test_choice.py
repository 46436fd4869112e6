"""The letter that a completion answers with."""

from __future__ import annotations

import time

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
        # What is said of other options after the answer.
        ("Answer: C\n\nOption A is wrong, since it is too large.", "C"),
        ("Answer: B. Choice A overlooks friction; option C has the wrong sign.", "B"),
        ("The correct answer is option D, since choice B is too small.", "D"),
        ("The answer is A. No, wait: the answer is D.", "D"),
        ("A. One\nB. Two\nC. Three\nAnswer: B", "B"),
        ("Options A and B are wrong. Therefore C is correct.", "C"),
        ("Option A is incorrect. Option D is correct.", "D"),
        ("So it is option B.", "B"),
        ("The answer should be (D)", "D"),
        ("Correct answer: \\textbf{(E)}", "E"),
        # A letter by itself, however it is set.
        (r"\mathrm{C}", "C"),
        (r"\(C\)", "C"),
        (r"\[C\]", "C"),
        ("$C$", "C"),
        ("`C`", "C"),
        ("b", "B"),
        (r"\boxed{b}", "B"),
        (r"\boxed{\mathrm{C}}", "C"),
        (r"\boxed{\(C\)}", "C"),
        (r"\boxed{\text{C. Paris}}", "C"),
        ("<answer>c</answer>", "C"),
        ("<answer>(B) Paris</answer>", "B"),
        (r"The final answer is $\mathrm{C}$.", "C"),
        ("**Answer:** (b)", "B"),
        ("Answer: b", "B"),
        ("The answer is **b**, because it is so.", "B"),
        ("B) Paris", "B"),
        # Full-width letters, quotation marks, dashes, other languages.
        ("\uff23", "C"),
        ("\uff08\uff23\uff09", "C"),
        ("\u7b54\u6848\uff1aC", "C"),
        ("\u7b54\u6848\u9009 B", "B"),
        ("The answer is \u201cD\u201d.", "D"),
        ("The answer is 'D'.", "D"),
        ("Answer - C", "C"),
        ("C \u2014 Paris", "C"),
        ("C.Paris", "C"),
        ("Antwort: B", "B"),
        (r"\boxed{(C)\ 12}", "C"),
        (r"\boxed{\textbf{(C)}\ 12}", "C"),
        (r"\boxed{\text{C}) 12}", "C"),
        ("<ANSWER>C</ANSWER>", "C"),
        ("The answer to this question is D", "D"),
        ("So I choose B.", "B"),
        ("I'd go with C.", "C"),
        ("It must be A.", "A"),
        # Arrows, headings, tags, dictionaries.
        ("Final choice -> D", "D"),
        ("Answer \u2192 D", "D"),
        ("#### C", "C"),
        ("Answer: <C>", "C"),
        ("Answer: <b>C</b>", "C"),
        ("{'answer': 'c'}", "C"),
        (r"\boxed{\rm C}", "C"),
        (r"\boxed{\bf{C}}", "C"),
        ("**B**: because", "B"),
        # Other sentences.
        ("B is the answer", "B"),
        ("B is the final answer.", "B"),
        ("Choose B", "B"),
        ("I'll say B", "B"),
        ("I think it is C", "C"),
        ("It's B", "B"),
        ("So, B.", "B"),
        ("A is too small. Thus **(C)**", "C"),
        ("Correct: B", "B"),
        ("Solution: B", "B"),
        ("La respuesta correcta es la B", "B"),
        ("La r\u00e9ponse est C", "C"),
        ("Die richtige Antwort ist D", "D"),
        ("It's A good idea, so I choose D", "D"),
        ("B is the answer to nothing. The answer is A.", "A"),
        ("It's a good one.", None),
        ("So a number it is", None),
        # A thought is no answer.
        ("<think>Answer: A. Hmm</think>B", "B"),
        (r"<think>\boxed{A}</think> B", "B"),
        ("<think>The answer is A</think>\n", "A"),
        # Several letters.
        ("The answer is A or B.", None),
        ("Answer: A and C", None),
        ("Answer: A, C", None),
        ("The answer is A, and C is wrong.", "A"),
        ("The answer is A or B. So the answer is B.", "B"),
        # No letters.
        ("The answer is a number.", None),
        ("Answer: I think so", None),
        ("The answer is not A.", None),
        ("The answer is not A but B.", "B"),
        ("The correct answer is not **(A)**, but rather option (C).", "C"),
        ("The answer is not A, but it could be", None),
        ("The answer is not A but a matter of taste", None),
        (r"\boxed{42}", None),
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
    assert score("b", {"answer": r"\text{(B)}"}) == 1.0


@pytest.mark.parametrize(
    "said",
    [
        "so, " * 20_000,
        "<" * 50_000,
        "answer:" + " " * 50_000,
        "answer is " + "*" * 50_000,
        "(* " * 20_000,
        "A is " * 20_000,
    ],
)
def test_long_nonsense_takes_no_time(said: str) -> None:
    started = time.perf_counter()
    assert letter_of(said) is None
    assert time.perf_counter() - started < 2
