"""What the scores of a benchmark come to: pass@k, means with intervals, and a test of two versions.

NumPy alone, since the flow process sums evaluations up. Rows are prompts, [P]; every interval and
test takes prompts as the unit that was drawn, never samples, which share their prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NORMAL_95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution
DRAWS = 10_000
AT_ONCE = 1 << 21  # random numbers in memory at a time
EXACT = 16  # pairs that differ, up to which every assignment of signs is counted


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedTest:
    """Two versions on the same prompts."""

    prompts: int  # P
    difference: float  # mean over prompts of the first's score less the second's
    low: float  # 95 % interval of it
    high: float
    p_value: float  # two-sided


def pass_at_k(samples: NDArray[np.int64], correct: NDArray[np.int64], k: int) -> float:
    """Probability that at least one of k samples of a prompt is right; mean over prompts.

    mean over prompts of 1 - C(n - c, k) / C(n, k), unbiased (arXiv:2107.03374, eq. 1); the mean over
    all P prompts.

    Args:
        samples: [P] n of each prompt, at least k.
        correct: [P] c of them are right.
        k: samples of which one has to be right.

    n = 5, c = 2, k = 2: 1 - C(3, 2) / C(5, 2) = 1 - 3 / 10 = 0.7.
    """
    assert len(samples) and samples.min() >= k >= 1
    missed = np.ones(len(samples))
    for i in range(k):  # C(n - c, k) / C(n, k) as a product of k factors
        missed *= np.maximum(samples - correct - i, 0) / (samples - i)
    return float((1 - missed).mean())


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % score interval of a proportion (Wilson 1927; method 3 of Newcombe 1998).

    (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n), p = successes / n.
    """
    assert 0 <= successes <= trials and trials > 0
    p, z2 = successes / trials, NORMAL_95**2
    centre = p + z2 / (2 * trials)
    half = NORMAL_95 * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials**2))
    scale = 1 + z2 / trials
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def bootstrap(scores: NDArray[np.float64], seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile interval of the mean of P prompts' scores [P], drawn anew DRAWS times."""
    assert len(scores)
    generator = np.random.default_rng(seed)
    means = [
        scores[generator.integers(0, len(scores), (draws, len(scores)))].mean(axis=1)
        for draws in _portions(len(scores))
    ]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)


def paired_test(
    first: NDArray[np.float64], second: NDArray[np.float64], seed: int = 0
) -> PairedTest:
    """Whether two versions differ on the same P prompts, by the permutation test of Fisher (1935).

    If they did not, each prompt's difference would as well have the other sign. The p-value is the
    share of assignments of signs with a sum as far from 0 as the one seen: of all 2^m where m prompts
    differ and m <= EXACT, else of DRAWS of them, with the one seen.

    Args:
        first: [P] scores of a version.
        second: [P] those of the other one.
        seed: of draws.
    """
    assert len(first) == len(second) > 0
    differences = first - second
    low, high = bootstrap(differences, seed)
    return PairedTest(
        prompts=len(differences),
        difference=float(differences.mean()),
        low=low,
        high=high,
        p_value=_p_value(np.abs(differences[differences != 0]), float(differences.sum()), seed),
    )


def _p_value(sizes: NDArray[np.float64], statistic: float, seed: int) -> float:
    """sizes: [m] of the differences that are none."""
    if not len(sizes):
        return 1.0
    far = abs(statistic) * (1 - 1e-12) - 1e-12  # sums that are equal but for rounding are as far
    if len(sizes) <= EXACT:
        codes = np.arange(1 << len(sizes))[:, None] >> np.arange(len(sizes))
        sums = ((codes & 1) * 2 - 1) @ sizes
        return float((np.abs(sums) >= far).mean())
    generator = np.random.default_rng(seed)
    count = 0
    for draws in _portions(len(sizes)):
        signs = generator.integers(0, 2, (draws, len(sizes))) * 2 - 1
        count += int((np.abs(signs @ sizes) >= far).sum())
    return (count + 1) / (DRAWS + 1)


def _portions(columns: int) -> Iterator[int]:
    """Draws to be made at a time, DRAWS in all, of so many numbers each."""
    size, remaining = max(1, AT_ONCE // columns), DRAWS
    while remaining > 0:
        yield min(size, remaining)
        remaining -= size
