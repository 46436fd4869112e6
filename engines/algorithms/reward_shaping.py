"""What is added to a sample's reward, and what becomes of a sample that was cut off.

All on whole batches of N samples and T response tokens, before the advantages. Penalties are in units
of reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.algorithms.aggregation import MetricSums, Rows, divide, mean_over
from engines.algorithms.group_advantages import Groups


def overlong_penalty(
    lengths: Tensor, *, max_tokens: int, buffer: int, factor: float, floor: float | None
) -> Tensor:
    """DAPO's soft overlong punishment: -factor (|y| - (max_tokens - buffer)) / buffer.

    For answers that reach into the last `buffer` tokens; 0 for the others. arXiv:2503.14476.

    Args:
        lengths: |y| [N], response tokens.
        max_tokens: longest response.
        buffer: tokens before it in which the penalty grows.
        factor: penalty at max_tokens.
        floor: the penalty is not below it; None: no bound.

    Returns:
        float64 [N], at most 0.
    """
    beyond = lengths.double() - (max_tokens - buffer)
    return (-beyond / buffer * factor).clamp(min=floor, max=0.0)


def length_penalty(
    lengths: Tensor, rewards: Tensor, groups: Tensor, *, factor: float, threshold: float
) -> Tensor:
    """Kimi k1.5's length reward: shorter than the rest of the group is better.

    factor * v with v = 1/2 - (|y| - min |y_g|) / (max |y_g| - min |y_g|) where the reward is above
    the threshold, min(0, v) elsewhere; 0 in a group of equal lengths. arXiv:2501.12599.

    Args:
        lengths: |y| [N], response tokens.
        rewards: [N].
        groups: int64 [N].
        factor: weight in the reward.
        threshold: reward above which an answer counts as right.

    Returns:
        float64 [N], within factor / 2 of 0.
    """
    group = Groups.of(groups)
    shortest, longest = group.smallest(lengths)[group.member], group.largest(lengths)[group.member]
    place = 0.5 - divide(lengths.double() - shortest, longest - shortest)
    place = torch.where(rewards > threshold, place, place.clamp(max=0.0))
    return factor * torch.where(longest == shortest, 0.0, place)


def repetition_penalty(ids: Tensor, rows: Rows, *, ngram: int, factor: float) -> Tensor:
    """-factor * (1 - distinct n-grams / n-grams) of each row; 0 for fewer than ngram tokens.

    "Demystifying Long Chain-of-Thought Reasoning", arXiv:2502.03373.

    Args:
        ids: integers [T], token ids.
        rows: N rows, T tokens.
        ngram: tokens in an n-gram.
        factor: penalty if every n-gram were the same.

    Returns:
        float64 [N], in (-factor, 0].
    """
    # The code of an n-gram is a dense number, built up token by token, so that it is exact.
    code = torch.unique(ids, return_inverse=True)[1]
    letters = int(code.max()) + 1 if code.numel() else 1
    letter, size = code, code.numel()
    for _ in range(ngram - 1):
        code = code[:-1] * letters + letter[letter.numel() - code.numel() + 1 :]
        code = torch.unique(code, return_inverse=True)[1]
    starts = rows.ids[: code.numel()]
    inside = starts == rows.ids[size - code.numel() :]
    whole = torch.unique(starts[inside] * max(size, 1) + code[inside])
    distinct = torch.bincount(whole // max(size, 1), minlength=rows.count).double()
    total = (rows.lengths - ngram + 1).clamp(min=0).double()
    return torch.where(total > 0, -factor * (1 - divide(distinct, total)), 0.0)


def without_truncated(mask: Tensor, rows: Rows, truncated: Tensor) -> Tensor:
    """mask [T] without the tokens of cut-off samples (truncated: bool [N]); DAPO's filtering."""
    return mask & (rows.spread(truncated.to(torch.float32)) == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaped:
    """Rewards after shaping."""

    rewards: Tensor  # [N]
    metrics: MetricSums  # mean of each penalty over the samples, and how many it touched


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalties:
    """Which penalties there are, by their functions' keyword arguments; None: not this one."""

    overlong: Mapping[str, Any] | None = None
    length: Mapping[str, Any] | None = None
    repetition: Mapping[str, Any] | None = None


def shape(
    rewards: Tensor,
    groups: Tensor,
    lengths: Tensor,
    truncated: Tensor,
    penalties: Penalties,
    when_truncated: str,
    repetition: Tensor | None = None,
) -> Shaped:
    """Add penalties to the rewards, and treat samples that were cut off.

    Penalties look at the rewards as given, not at each other. No token is looked at: a repetition
    penalty is made before, and tokens are masked afterwards (`without_truncated`).

    Args:
        rewards: [N].
        groups: int64 [N]; samples of one prompt share a number.
        lengths: [N], response tokens.
        truncated: bool [N], ended by the limit of tokens.
        penalties: those to add.
        when_truncated: "keep" such a sample as it is, "mask" its tokens (by whoever reads them), or
            "zero" its reward.
        repetition: float64 [N], of `repetition_penalty`, where it is one of the penalties.

    Returns:
        Rewards; the metrics' means and counts are over all N samples.
    """
    terms: dict[str, Tensor] = {}
    if penalties.overlong is not None:
        terms["overlong"] = overlong_penalty(lengths, **penalties.overlong)
    if penalties.length is not None:
        terms["length"] = length_penalty(lengths, rewards, groups, **penalties.length)
    if penalties.repetition is not None:
        assert repetition is not None, "the repetition penalty is made from token ids before"
        terms["repetition"] = repetition
    changed = rewards
    if when_truncated == "zero":
        changed = torch.where(truncated, 0.0, changed)
    for term in terms.values():
        changed = changed + term.to(rewards.dtype)
    every = torch.ones_like(truncated)
    means = {f"penalty_{name}": mean_over(term, every) for name, term in terms.items()}
    means["truncated"] = mean_over(truncated, every)
    touched = {f"{name}_samples": (term != 0).sum().double() for name, term in terms.items()}
    touched["truncated_samples"] = truncated.sum().double()
    return Shaped(rewards=changed, metrics=MetricSums(means=means, sums=touched))
