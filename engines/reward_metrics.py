"""Figures of the rewards of a batch, for the log."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engines.groups import Groups


def reward_metrics(
    rewards: Tensor, groups: Tensor, components: Mapping[str, Tensor]
) -> dict[str, float]:
    """Mean and deviation (divisor n - 1) of the rewards [N] and components [N], NaN left out.

    group_std is the mean over the groups of their deviations, zero_std_groups the share of groups
    whose rewards are all equal.
    """
    group = Groups.of(groups, ~rewards.isnan())
    counted = group.sizes > 0
    figures = {
        "group_std": group.deviation(rewards)[counted].mean(),
        "zero_std_groups": group.uniform(rewards)[counted].double().mean(),
    }
    for name, component in {"reward": rewards, **components}.items():
        whole = Groups.of(torch.zeros_like(groups), ~component.isnan())
        figures[f"{name}_mean"] = component.nanmean()
        figures[f"{name}_std"] = whole.deviation(component).squeeze(0)
    return {name: float(value) for name, value in figures.items()}
