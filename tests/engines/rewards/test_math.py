r"""References of mathematics: read as they are meant, equal to what is equal, and to nothing else."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from configs.rewards import MathReward
from engines.rewards.builtin import Scorer, math_scorer
from engines.rewards.child import SampleScorer
from engines.rewards.math_answers import reference_of
from engines.rewards.protocol import RewardCall
from tests.engines.rewards.math_references import EQUIVALENTS, PAIRS


@pytest.fixture(scope="module")
def score() -> Scorer:
    return math_scorer(MathReward(answer_after=None))


def test_references_of_every_kind_score_themselves(score: Scorer) -> None:
    for reference in EQUIVALENTS:
        row = {"answer": reference}
        bare = reference.strip("$")
        assert score(f"The answer is $\\boxed{{{bare}}}$.", row) == 1.0, reference
        assert score(reference, row) == 1.0, reference
        read = reference_of(reference)
        assert read is not None
        assert read.readable, reference


def test_other_ways_to_write_a_reference(score: Scorer) -> None:
    assert len(PAIRS) >= 200
    missed = [
        (reference, other)
        for reference, other in PAIRS
        if score(f"So it is $\\boxed{{{other}}}$.", {"answer": reference}) != 1.0
    ]
    assert missed == []


def neighbours(reference: str) -> Iterator[str]:
    """Wrong answers that look like a reference: a number of it, another sign, bracket or digit."""
    without_unit = re.sub(
        r"\\(?:text|mbox)\{.*|\^\\circ|[\\$%]|[xy] ?= ?|(?<=\d) [a-z]+$", "", reference
    )
    numbers = list(re.finditer(r"\d+(?:\.\d+)?", reference))
    if numbers and numbers[0][0] != without_unit.strip():
        yield numbers[0][0]
    for number in numbers[:1] + numbers[-1:]:
        digit = number.end() - 1
        yield reference[:digit] + str((int(reference[digit]) + 1) % 10) + reference[digit + 1 :]
    if numbers and float(numbers[0][0]):
        yield reference.removeprefix("-") if reference.startswith("-") else f"-{reference}"
    for sign in re.finditer(r"(?<=[\w})]) ?[+-] ?(?=[\w\\(])", reference):
        other = "-" if "+" in sign[0] else "+"
        yield reference[: sign.start()] + other + reference[sign.end() :]
    yield from {
        reference.replace(old, new)
        for old, new in (
            (r"\pm", "+"), ("<", ">"), (r"\ge ", r"\le "), (r"\le ", r"< "), (r"\{", "("),
        )
        if old in reference
    }  # fmt: skip
    if re.search(r"[(\[].*,.*[)\]]", reference) and "{(" not in reference:
        yield re.sub(r"\((?=.*,)", "[", reference, count=1)
        yield re.sub(r"\)$", "]", reference)
        yield re.sub(r"\]$", ")", reference)
        yield re.sub(r"^(?:\\left)?\((.*?)(?:\\right)?\)$", r"\\{\1\\}", reference)


def test_neighbours_of_a_reference_are_worth_nothing(score: Scorer) -> None:
    tried, worth = 0, []
    for reference in EQUIVALENTS:
        if reference.startswith(("$", r"\(", r"\boxed")):
            continue
        for wrong in set(neighbours(reference)) - {reference}:
            tried += 1
            if score(f"So it is $\\boxed{{{wrong}}}$.", {"answer": reference}):
                worth.append((reference, wrong))
    assert tried > 200
    assert worth == []


@pytest.mark.parametrize(
    ("completion", "reference", "worth"),
    [
        (r"\boxed{1}. No: \boxed{2}", "2", 1),
        (r"\boxed{1}. No: \boxed{2}", "1", 0),
        (r"\boxed{1}. No: \boxed{2}", "1, 2", 0),
        (r"\boxed{1}\boxed{2}", "2", 1),
        (r"$\boxed{1}$, no, wait: $\boxed{2}$", "2", 1),
        (r"\boxed{x < 3} or rather \boxed{x > 3}", "x > 3", 1),
        (r"\boxed{2}, and that is all. \boxed{}", "2", 1),
        (r"\boxed{2}. Now \boxed{3", "2", 1),
        (r"\boxed{\boxed{2}}", "2", 1),
        (r"\fbox{2}", "2", 1),
        (r"\boxed{\left\{ 1, 2 \right\}}", "1,2", 1),
        (r"\boxed{\{ x : x < 3}. So \boxed{3}", "3", 1),
        # Values in boxes of their own are a list, where the reference is one.
        (r"$\boxed{1}$ and $\boxed{-2}$", "1,-2", 1),
        (r"$x = \boxed{1}$ or $x = \boxed{-2}$", "-2, 1", 1),
        (r"$\boxed{1}$ and $\boxed{-2}$", "1", 0),
        (r"\boxed{1, 2}", "2", 0),
        (r"\boxed{5}", "5, 5", 0),
        # Without a box.
        ("The answer is $x < 3$.", "x < 3", 1),
        ("The answer is x < 3.", "x < 3", 1),
        ("Answer: Evelyn", r"\text{Evelyn}", 1),
        ("The answer is (C).", r"\text{(C)}", 1),
        ("The answer is 72.", "72", 1),
        ("3", r"3\sqrt{13}", 0),
        ("The answer is 3.", "x < 3", 0),
        # The same words, and others.
        (r"\boxed{\text{Evelyn and Navin}}", r"\text{Evelyn}", 0),
        (r"\boxed{\text{odd}}", r"\text{even}", 0),
        (r"\boxed{\text{(D)}}", r"\text{(C)}", 0),
        # A small decimal counts in its digits.
        (r"\boxed{.0000673}", ".0000672", 0),
        (r"\boxed{0.333333}", r"\frac{1}{3}", 1),
        # Bases, units, infinity.
        (r"\boxed{52}", "52_8", 0),
        (r"\boxed{52_7}", "52_8", 0),
        (r"\boxed{42_{10}}", "42", 1),
        (r"\boxed{52_8}", "52", 0),
        (r"\boxed{15\text{ cm}^3}", r"15\mbox{ cm}^2", 0),
        (r"\boxed{(2, \infty]}", r"(2,\infty)", 0),
        (r"\boxed{\langle 6, 31, -1 \rangle}", "(6,31,-1)", 1),
        (r"\boxed{4, 2}", "(2,4)", 0),
        # Mixed numbers, powers of ten, repeating decimals.
        (r"\boxed{21/2}", "2 1/2", 0),
        (r"\boxed{\frac{5}{2}}", "2 1/2", 1),
        (r"\boxed{3 1/4}", "3.25", 1),
        (r"\boxed{1500}", "1.5e3", 1),
        (r"\boxed{1.5E3}", r"1.5 \times 10^3", 1),
        (r"\boxed{15}", "1.5e3", 0),
        (r"\boxed{0.000002}", "2e-06", 1),
        (r"\boxed{-5 + 3e}", "3e-5", 1),
        (r"\boxed{\frac13}", r"0.\overline{3}", 1),
        (r"\boxed{0.1\overline6}", r"\frac{1}{6}", 1),
        (r"\boxed{0.\overline{16}}", r"0.1\overline{6}", 0),
        (r"\boxed{1\,000\,000}", "1,000,000", 1),
        (r"\boxed{\frac{100}{3}\%}", r"33\frac{1}{3}\%", 1),
        (r"\boxed{34\%}", r"33\frac{1}{3}\%", 0),
        # Times of day, which are no ratios.
        (r"\boxed{1:10}", "3:30", 0),
        (r"\boxed{3:30 \text{ PM}}", "3:30", 1),
        (r"\boxed{3\!:\!30\text{ p.m.}}", "3:30 PM", 1),
        (r"\boxed{3:30\text{ a.m.}}", "3:30 PM", 0),
        (r"\boxed{\frac{2}{3}}", "2:3", 1),
        # The solution of a system, in its order; conditions and unions.
        (r"\boxed{(2,1)}", "x=1, y=2", 0),
        (r"\boxed{(1,2)}", "x=1, y=2", 1),
        (r"\boxed{-1, 3}", "a=3, b=-1", 0),
        (r"\boxed{2, 5}", "2<x<5", 0),
        (r"\boxed{x < -1 \text{ or } x > 1}", r"(-\infty,-1)\cup(1,\infty)", 1),
        (r"\boxed{x < -1 \text{ or } x > 2}", r"(-\infty,-1)\cup(1,\infty)", 0),
        (r"\boxed{\{x \mid 0 \le x < 1\}}", "[0,1)", 1),
        # Both signs within a fraction.
        (r"\boxed{\frac{-1+\sqrt5}{2}, \frac{-1-\sqrt5}{2}}", r"\frac{-1\pm\sqrt{5}}{2}", 1),
        (r"\boxed{\frac{-1+\sqrt5}{2}}", r"\frac{-1\pm\sqrt{5}}{2}", 0),
        # Units, currencies, and how a number is set.
        (r"\boxed{30\text{ cm}^2}", r"30\text{ cm}", 0),
        (r"\boxed{30\text{ cm}}", r"30\text{ cm}^2", 0),
        (r"\boxed{5.2}", "\u20ac5.20", 1),
        (r"\boxed{5}", "\u20ac5.20", 0),
        (r"\boxed{13}", r"\text{13 years old}", 1),
        (r"\boxed{\color{red}{10}}", "10", 1),
        (r"\boxed{\textbf{(B)}\ 5}", r"\text{(B)}", 1),
        (r"\boxed{\textbf{(D)}\ 5}", r"\text{(B)}", 0),
        (r"\boxed{(1011)_2}", "1011_2", 1),
        (r"\boxed{\varnothing}", r"\emptyset", 1),
        (r"\boxed{sqrt(2)}", r"\sqrt{2}", 1),
        # Degrees beside parts of pi.
        (r"\boxed{45^\circ}", r"\frac{\pi}{4}", 1),
        (r"\boxed{\frac{\pi}{4}}", r"45^\circ", 1),
        (r"\boxed{\pi}", r"180^{\circ}", 1),
        (r"\boxed{120\degree}", r"\frac{2\pi}{3}", 1),
        (r"\boxed{45}", r"\frac{\pi}{4}", 0),
        (r"\boxed{45^\circ}", r"\frac{\pi}{3}", 0),
        (r"\boxed{180\pi}", r"180^\circ", 0),
        (r"\boxed{45\pi^\circ}", r"\frac{\pi}{4}", 0),
        # Lists of words.
        (r"\boxed{A, B}", r"\text{A and B}", 1),
        (r"\boxed{\text{A and B}}", "A, B", 1),
        (r"\boxed{\text{A, B, and C}}", "A,B,C", 1),
        (r"\boxed{\text{Navin and Evelyn}}", r"\text{Evelyn and Navin}", 1),
        (r"\boxed{\text{odd, even}}", r"\text{even, odd}", 0),
        (r"\boxed{A, C}", r"\text{A and B}", 0),
        (r"\boxed{\text{A or B}}", r"\text{A and B}", 0),
        (r"\boxed{\text{A and B}}", "A,B,C", 0),
        (r"\boxed{\text{a and b}}", "A, B", 0),
        # What SymPy cannot hold is a wrong answer, no failure.
        (rf"\boxed{{0.\overline{{{'1' * 5000}}}}}", "5", 0),
        (r"\boxed{(i, 2)}", "(1,2)", 0),
        (r"\boxed{i < 3}", "x < 3", 0),
        (r"\boxed{\frac{1}{0}}", "2", 0),
    ],
)
def test_what_a_completion_answers(
    score: Scorer, completion: str, reference: str, worth: int
) -> None:
    assert score(completion, {"answer": reference}) == worth


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        *(
            pytest.param(each, marks=pytest.mark.slow)  # each waits for the deadline
            for each in ("1000000!", r"\sum_{i=1}^{10^9} i^i", "(" * 5000 + "1" + ")" * 5000)
        ),
    ],
)
def test_an_answer_that_takes_too_long_is_wrong_and_not_failed(score: Scorer, answer: str) -> None:
    by_sample = SampleScorer(score, 8.0)
    completion, row = f"So $\\boxed{{{answer}}}$.", {"answer": "5"}
    call = RewardCall(
        prompts=["q"], completions=[completion], completion_ids=[()], rows=[row],
        global_step=0, max_steps=1, epoch=0.0,
    )  # fmt: skip
    reply = by_sample(call)
    assert (reply.values, reply.errors) == ([0.0], {})


def test_a_machine_that_stands_still_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "engines.rewards.math_answers.answers", lambda completion, reference: bool(time.sleep(9))
    )
    by_sample = SampleScorer(math_scorer(MathReward(answer_after=None)), 0.2)
    call = RewardCall(
        prompts=["q"], completions=["5"], completion_ids=[()], rows=[{"answer": "5"}],
        global_step=0, max_steps=1, epoch=0.0,
    )  # fmt: skip
    assert by_sample(call).errors == {0: "took longer than 0.2 s"}


def test_the_marker_of_a_reference() -> None:
    score = math_scorer(MathReward())
    assert score(r"\boxed{3}", {"answer": "1 + 2 = 3\n#### 3"}) == 1.0
    assert score(r"\boxed{x < 3}", {"answer": "so\n#### x < 3"}) == 1.0
    assert score(r"\boxed{3}", {"answer": "####"}) is None


def test_boxes_without_end_take_no_time(score: Scorer) -> None:
    started = time.perf_counter()
    assert score("\\boxed{" * 20_000 + "3}", {"answer": "3"}) == 1.0
    assert time.perf_counter() - started < 5
