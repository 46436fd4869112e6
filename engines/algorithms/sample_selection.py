"""Which samples of a batch are trained on, from their rewards. Each answers keep: bool [N].

The rules by name are in SELECTIONS: rule(rewards [N], groups [N], **params), groups int64 numbers
that the samples of one prompt share. A new one is one function and one line there, or a user's import
path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.algorithms.group_advantages import Groups


def informative_groups(rewards: Tensor, groups: Tensor, *, keep_lone: bool) -> Tensor:
    """Dynamic sampling: leave out the groups whose rewards are all equal (DAPO, arXiv:2503.14476).

    Their group-relative advantages are 0. Equal means equal, without rounding.

    Args:
        rewards: [N].
        groups: int64 [N].
        keep_lone: keep the groups of one.
    """
    group = Groups.of(groups)
    useful = ~group.uniform(rewards)
    if keep_lone:
        useful = useful | (group.sizes == 1)
    return useful[group.member]


def best_of(rewards: Tensor, groups: Tensor, *, best: int, worst: int) -> Tensor:
    """The `best` samples with the highest reward of each group and the `worst` with the lowest.

    Ties by order. best-of-n for worst = 0.

    Args:
        rewards: [N].
        groups: int64 [N].
        best: samples per group.
        worst: samples per group.
    """
    group = Groups.of(groups)
    place = group.ranks(rewards)
    return (place < best) | (place >= group.sizes[group.member] - worst)


def top_p_groups(rewards: Tensor, groups: Tensor, *, share: float) -> Tensor:
    """The fewest groups whose deviations make up `share` of all deviations (StarPO-S's filter).

    Groups with the largest standard deviation (divisor n - 1) first. Without any deviation nothing
    is kept. RAGEN, arXiv:2504.20073.

    Args:
        rewards: [N].
        groups: int64 [N].
        share: of the sum of the groups' deviations, in (0, 1].
    """
    group = Groups.of(groups)
    deviation, order = group.deviation(rewards).sort(descending=True, stable=True)
    before = deviation.cumsum(0) - deviation
    selected = (before < share * deviation.sum() * (1 - 1e-12)) & (deviation > 0)
    chosen = selected.new_zeros(selected.numel())
    chosen[order] = selected
    return chosen[group.member]


def success_rate(
    rewards: Tensor, groups: Tensor, *, low: float, high: float, success: float
) -> Tensor:
    """Leave out groups whose share of successes is below `low` or above `high`.

    SRPO, arXiv:2511.15605; siiRL's `embodied_sampling`.

    Args:
        rewards: [N].
        groups: int64 [N].
        low: share in [0, 1].
        high: share in [0, 1].
        success: a sample with this reward or more is one.
    """
    group = Groups.of(groups)
    share = group.mean((rewards >= success).double())
    return ((share >= low) & (share <= high))[group.member]


SELECTIONS: Mapping[str, Callable[..., Tensor]] = {
    "informative": informative_groups,
    "best_of": best_of,
    "top_p_groups": top_p_groups,
    "success_rate": success_rate,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionRule:
    """A rule with its parameters."""

    name: str  # of its metric, <name>_left_out
    function: Callable[..., Tensor]
    params: Mapping[str, Any]
    before_shaping: bool = False  # it looks at the rewards as they were given


@dataclass(frozen=True, kw_only=True, slots=True)
class Selected:
    """Which samples all rules keep."""

    keep: Tensor  # bool [N]
    left_out_by: Tensor  # int64 [N], number of the rule that left a sample out; -1: kept
    metrics: dict[str, float]  # samples that each rule left out


def select(
    rewards: Tensor, groups: Tensor, rules: Sequence[SelectionRule], given: Tensor | None = None
) -> Selected:
    """Apply the rules in order; each sees what those before it kept.

    Args:
        rewards: [N].
        groups: int64 [N].
        rules: of two of one name the metrics are added up.
        given: [N], the rewards before they were shaped; None: they were not.
    """
    keep = torch.ones_like(groups, dtype=torch.bool)
    left_out_by = torch.full_like(groups, -1)
    metrics: dict[str, float] = {}
    for number, rule in enumerate(rules):
        places = keep.nonzero().squeeze(-1)
        values = given if rule.before_shaping and given is not None else rewards
        keep[places] = rule.function(values[places], groups[places], **rule.params)
        left_out_by[places] = torch.where(keep[places], -1, number)
        name = f"{rule.name}_left_out"
        metrics[name] = metrics.get(name, 0.0) + float(places.numel() - int(keep.sum()))
    return Selected(keep=keep, left_out_by=left_out_by, metrics=metrics)
