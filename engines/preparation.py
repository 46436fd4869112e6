"""From the scores of a batch to what the advantages are made of: shaping and selection by recipe.

The pieces are in shaping.py and selection.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.corrections import SelectionStep, ShapingConfig
from engines.imports import imported
from engines.jagged import Rows
from engines.metric_sums import MetricSums, mean_over
from engines.selection import SELECTIONS
from engines.shaping import (
    length_penalty,
    overlong_penalty,
    repetition_penalty,
    without_truncated,
)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Selected:
    """Which samples every step of a recipe keeps."""

    keep: Tensor  # bool [N]
    metrics: dict[str, float]  # samples that each step left out


def select(rewards: Tensor, groups: Tensor, steps: Sequence[SelectionStep]) -> Selected:
    """Apply the recipe's steps to rewards [N] and groups [N]; each sees what those before it kept."""
    keep = torch.ones_like(groups, dtype=torch.bool)
    metrics: dict[str, float] = {}
    for step in steps:
        function = imported(step.path) if step.kind == "function" else SELECTIONS[step.kind]
        left = keep.nonzero().squeeze(-1)
        keep[left] = function(rewards[left], groups[left], **step.arguments())
        name = f"{step.kind}_left_out"
        metrics[name] = metrics.get(name, 0.0) + float(left.numel() - int(keep.sum()))
    return Selected(keep=keep, metrics=metrics)
