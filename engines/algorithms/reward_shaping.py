"""What is added to a sample's reward, and what becomes of a sample that was cut off.

All on whole batches: [N] samples, [T] response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.algorithm.corrections import ShapingConfig
from engines.algorithms.groups import Groups
from engines.algorithms.jagged import Rows, cumulative_sums, divide
from engines.algorithms.metric_sums import MetricSums, mean_over


def overlong_penalty(
    lengths: Tensor, *, max_tokens: int, buffer: int, factor: float, floor: float | None
) -> Tensor:
    """DAPO's soft overlong punishment [N], at most 0.

    -factor (|y| - (max_tokens - buffer)) / buffer for answers that reach into the last `buffer`
    tokens, not below floor. arXiv:2503.14476.
    """
    beyond = lengths.double() - (max_tokens - buffer)
    return (-beyond / buffer * factor).clamp(min=floor, max=0.0)


def length_penalty(
    lengths: Tensor, rewards: Tensor, groups: Tensor, *, factor: float, threshold: float
) -> Tensor:
    """Kimi k1.5's length reward [N]: shorter than the rest of the group is better.

    factor * v with v = 1/2 - (|y| - min |y_g|) / (max |y_g| - min |y_g|) where the reward is above
    the threshold, min(0, v) elsewhere; 0 in a group of equal lengths. arXiv:2501.12599.
    """
    group = Groups.of(groups)
    shortest, longest = group.smallest(lengths)[group.member], group.largest(lengths)[group.member]
    place = 0.5 - divide(lengths.double() - shortest, longest - shortest)
    place = torch.where(rewards > threshold, place, place.clamp(max=0.0))
    return factor * torch.where(longest == shortest, 0.0, place)


def repetition_penalty(ids: Tensor, rows: Rows, *, ngram: int, factor: float) -> Tensor:
    """-factor * (1 - distinct n-grams / n-grams) of each row [N]; 0 for fewer than ngram tokens.

    "Demystifying Long Chain-of-Thought Reasoning", arXiv:2502.03373.
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


def mask_through_end(ids: Tensor, rows: Rows, end_ids: Tensor) -> Tensor:
    """bool [T]: True up to the first of end_ids in each row, itself included."""
    ended = torch.isin(ids, end_ids).to(torch.float64)
    return cumulative_sums(ended, rows) - ended == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaped:
    """Rewards and mask after shaping."""

    rewards: Tensor  # [N]
    mask: Tensor  # bool [T]
    metrics: MetricSums  # mean of each penalty over the samples, and how many it touched


def shape(
    rewards: Tensor,
    groups: Tensor,
    response_ids: Tensor,
    rows: Rows,
    mask: Tensor,
    truncated: Tensor,
    shaping: ShapingConfig,
    max_tokens: int,
) -> Shaped:
    """Add the recipe's penalties to rewards [N], and treat samples that were cut off.

    response_ids, mask: [T]; truncated: bool [N]; max_tokens: the longest response, where the
    overlong penalty does not say. Penalties look at the scores as given, not at each other.
    """
    terms: dict[str, Tensor] = {}
    if shaping.overlong is not None:
        limit = {"max_tokens": shaping.overlong.max_tokens or max_tokens}
        terms["overlong"] = overlong_penalty(
            rows.lengths, **(shaping.overlong.model_dump() | limit)
        )
    if shaping.length is not None:
        terms["length"] = length_penalty(
            rows.lengths, rewards, groups, **shaping.length.model_dump()
        )
    if shaping.repetition is not None:
        terms["repetition"] = repetition_penalty(
            response_ids, rows, **shaping.repetition.model_dump()
        )
    changed = rewards
    if shaping.truncated == "zero":
        changed = torch.where(truncated, 0.0, changed)
    elif shaping.truncated == "mask":
        mask = without_truncated(mask, rows, truncated)
    for term in terms.values():
        changed = changed + term.to(rewards.dtype)
    every = torch.ones_like(truncated)
    means = {f"penalty_{name}": mean_over(term, every) for name, term in terms.items()}
    means["truncated"] = mean_over(truncated, every)
    touched = {f"{name}_samples": (term != 0).sum().double() for name, term in terms.items()}
    touched["truncated_samples"] = truncated.sum().double()
    return Shaped(rewards=changed, mask=mask, metrics=MetricSums(means=means, sums=touched))
