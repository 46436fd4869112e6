"""pass@k, intervals and the paired test, against literal numbers of the papers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from engines.algorithms.evaluation import bootstrap, paired_test, pass_at_k, wilson

# Differences in height of Darwin's pairs of maize, in eighths of an inch (Fisher 1935, section 17).
DARWIN = np.array([49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48], dtype=float)


def counts(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (5, 2, 2, 0.7),  # 1 - C(3,2) / C(5,2) = 1 - 3/10
        (10, 3, 1, 0.3),
        (4, 1, 2, 0.5),
        (8, 8, 4, 1.0),
        (8, 0, 4, 0.0),
        (4, 3, 2, 1.0),  # of four with one wrong, two are never both wrong
        (200, 20, 10, 1 - math.comb(180, 10) / math.comb(200, 10)),
    ],
)
def test_pass_at_k_is_that_of_the_paper(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(counts(n), counts(c), k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_unbiased_and_the_plug_in_estimate_is_not() -> None:
    """Over all 2^5 outcomes of five samples, each right with probability 0.3."""
    p, n, k = 0.3, 5, 3
    mean = plugged_in = 0.0
    for outcome in itertools.product([0, 1], repeat=n):
        c = sum(outcome)
        chance = p**c * (1 - p) ** (n - c)
        mean += chance * pass_at_k(counts(n), counts(c), k)
        plugged_in += chance * (1 - (1 - c / n) ** k)
    assert mean == pytest.approx(1 - 0.7**3, abs=1e-12)
    assert plugged_in < mean - 0.05


def test_pass_at_k_is_a_mean_over_prompts_of_unequal_samples() -> None:
    assert pass_at_k(counts(5, 4), counts(2, 1), 2) == pytest.approx((0.7 + 0.5) / 2)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [  # Newcombe (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_is_that_of_the_paper(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_the_bootstrap_is_seeded_and_near_the_normal_interval() -> None:
    scores = np.random.default_rng(3).normal(2.0, 1.0, 400)
    low, high = bootstrap(scores)
    assert bootstrap(scores) == (low, high)
    half = 1.96 * scores.std() / 20
    assert (low, high) == pytest.approx((scores.mean() - half, scores.mean() + half), abs=0.01)
    assert bootstrap(np.array([0.5, 0.5])) == (0.5, 0.5)


def test_the_paired_test_is_fishers_of_darwins_maize() -> None:
    """863 of 2^15 sums are as large, and as many as small: 5.267 %."""
    found = paired_test(DARWIN, np.zeros(15))
    assert found.p_value == pytest.approx(2 * 863 / 2**15)
    assert found.difference == pytest.approx(314 / 15)
    assert paired_test(np.zeros(15), DARWIN).p_value == found.p_value


def test_the_paired_test_of_many_prompts_draws_signs() -> None:
    """Every pair ten times: the exact p-value is out of reach, the normal one is near."""
    generator = np.random.default_rng(1)
    first = generator.normal(0.0, 1.0, 300)
    second = first - generator.normal(0.1, 1.0, 300)
    differences = first - second
    found = paired_test(first, second)
    z = abs(differences.sum()) / math.sqrt((differences**2).sum())
    assert found.p_value == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.02)
    assert paired_test(first, first).p_value == 1.0
