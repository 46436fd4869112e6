"""Which samples of a batch are trained on, from their rewards. Each answers keep: bool [N].

Selection by name in SELECTIONS: select(rewards [N], groups [N], **params). A new one is one function
and one line there, or a user's import path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.algorithm.corrections import SelectionStep
from engines.algorithms.groups import Groups
from engines.imports import imported


def informative_groups(rewards: Tensor, groups: Tensor, *, keep_lone: bool) -> Tensor:
    """Dynamic sampling: leave out the groups whose rewards are all equal (DAPO, arXiv:2503.14476).

    Their group-relative advantages are 0. Equal means equal, without rounding.
    """
    group = Groups.of(groups)
    useful = ~group.uniform(rewards)
    if keep_lone:
        useful = useful | (group.sizes == 1)
    return useful[group.member]


def best_of(rewards: Tensor, groups: Tensor, *, best: int, worst: int) -> Tensor:
    """The `best` samples with the highest reward of each group and the `worst` with the lowest.

    Ties by order. best-of-n for worst = 0.
    """
    group = Groups.of(groups)
    place = group.ranks(rewards)
    return (place < best) | (place >= group.sizes[group.member] - worst)


def top_p_groups(rewards: Tensor, groups: Tensor, *, share: float) -> Tensor:
    """The fewest groups whose deviations make up `share` of all deviations (StarPO-S's filter).

    Groups with the largest standard deviation first. Without any deviation nothing is kept.
    RAGEN, arXiv:2504.20073.
    """
    group = Groups.of(groups)
    deviation, order = group.deviation(rewards).sort(descending=True, stable=True)
    before = deviation.cumsum(0) - deviation
    kept = (before < share * deviation.sum() * (1 - 1e-12)) & (deviation > 0)
    chosen = kept.new_zeros(kept.numel())
    chosen[order] = kept
    return chosen[group.member]


SELECTIONS: Mapping[str, Callable[..., Tensor]] = {
    "informative": informative_groups,
    "best_of": best_of,
    "top_p_groups": top_p_groups,
}


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
