"""Two rewards of the same samples side by side: how they differ, and what that does to training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardComparison:
    """Metrics over the samples that both rewards could score. None where they say nothing."""

    samples: int  # scored by both
    failed: int  # samples that the new reward could not score
    mean: tuple[float, float]  # old, new
    spread: tuple[float, float]  # standard deviation over the samples
    correlation: float | None  # Pearson's; None where one of them is constant
    groups: int  # with at least two samples that both scored
    reordered: int  # groups in which some pair of samples changes places
    new_best: int  # groups whose best sample under the old reward is not best under the new
    rank_change: float  # mean absolute change of a sample's rank within its group
    flipped: float  # share of samples whose advantage (reward minus its group's mean) changes sign
    silenced: float  # share of samples whose advantage was not 0 and becomes 0
    woken: float  # share of samples whose advantage was 0 and becomes another


def compare_rewards(old: Numbers, new: Numbers, groups: NDArray[np.int64]) -> RewardComparison:
    """Compare two rewards of N samples.

    Args:
        old: [N], NaN where the sample has none, as in `new`.
        new: [N].
        groups: [N], samples of one prompt share a number.
    """
    scored = np.isfinite(old) & np.isfinite(new)
    failed = int((~np.isfinite(new)).sum())
    old, new, groups = old[scored], new[scored], groups[scored]
    _, member, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    changes = [
        _group_changes(old[member == g], new[member == g]) for g in np.flatnonzero(sizes > 1)
    ]
    before, after = _centred(old, member), _centred(new, member)
    count = max(len(old), 1)
    return RewardComparison(
        samples=len(old),
        failed=failed,
        mean=(_mean(old), _mean(new)),
        spread=(float(old.std()) if len(old) else 0.0, float(new.std()) if len(new) else 0.0),
        correlation=_correlation(old, new),
        groups=len(changes),
        reordered=sum(change[0] for change in changes),
        new_best=sum(change[1] for change in changes),
        rank_change=_mean(np.array([change for group in changes for change in group[2]])),
        flipped=float((before * after < 0).sum()) / count,
        silenced=float(((before != 0) & (after == 0)).sum()) / count,
        woken=float(((before == 0) & (after != 0)).sum()) / count,
    )


def _mean(values: Numbers) -> float:
    return float(values.mean()) if len(values) else 0.0


def _centred(rewards: Numbers, member: NDArray[np.int64]) -> Numbers:
    """Sign of each reward minus its group's mean; a rounding error is no difference."""
    sums = np.bincount(member, weights=rewards, minlength=1)
    means = sums / np.maximum(np.bincount(member, minlength=1), 1)
    gap = rewards - means[member] if len(rewards) else rewards
    scale = np.maximum(np.abs(rewards), 1.0)
    return np.where(np.abs(gap) > 1e-9 * scale, np.sign(gap), 0.0)


def _correlation(old: Numbers, new: Numbers) -> float | None:
    if len(old) < 2 or old.std() == 0 or new.std() == 0:
        return None
    return float(np.corrcoef(old, new)[0, 1])


def _group_changes(old: Numbers, new: Numbers) -> tuple[bool, bool, list[float]]:
    """Whether a pair changes places, whether the best changes, and each sample's rank change."""
    first = np.sign(old[:, None] - old[None, :])
    second = np.sign(new[:, None] - new[None, :])
    best = set(np.flatnonzero(old == old.max()).tolist())
    now = set(np.flatnonzero(new == new.max()).tolist())
    ranks = [_ranks(values) for values in (old, new)]
    return bool((first * second < 0).any()), not best & now, np.abs(ranks[0] - ranks[1]).tolist()


def _ranks(values: Numbers) -> Numbers:
    """Rank of each value from 0 for the lowest; equal values share the mean of theirs."""
    below = (values[:, None] > values[None, :]).sum(axis=1)
    same = (values[:, None] == values[None, :]).sum(axis=1)
    return below + (same - 1) / 2
