"""Advantage estimators: from rewards to one advantage per token.

An estimator is one function and one line in ADVANTAGES: estimator(batch, **params) -> Advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engines.advantage_batch import AdvantageBatch, Advantages


def grpo(batch: AdvantageBatch, *, normalize: str, epsilon: float) -> Advantages:
    """Group-relative: A_i = (r_i - mean(r_g)) / (std(r_g) + epsilon), the same at every token.

    GRPO arXiv:2402.03300. std has the divisor n - 1. normalize: "group" divides by the group's
    deviation, "batch" by the whole batch's, "none" not at all (Dr. GRPO, arXiv:2503.20783).
    A group of one keeps its raw reward, as verl does.
    """
    rewards = batch.totals()
    group, sizes = _numbered(batch.groups)
    alone = (sizes == 1)[group]
    mean = _group_sum(rewards, group, sizes) / sizes
    centred = rewards - torch.where(alone, 0.0, mean[group])
    if normalize == "group":
        squares = _group_sum((rewards - mean[group]).square(), group, sizes)
        deviation = (squares / (sizes - 1).clamp(min=1)).sqrt()[group]
        centred = centred / (torch.where(alone, 1.0, deviation) + epsilon)
    elif normalize == "batch":
        centred = centred / (rewards.std() + epsilon if rewards.numel() > 1 else 1.0)
    advantages = batch.at_tokens(centred)
    return Advantages(advantages=advantages)


def _numbered(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Group of each sample numbered from 0 [N], and the size of each group [G]."""
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    return group, sizes


def _group_sum(values: Tensor, group: Tensor, sizes: Tensor) -> Tensor:
    return values.new_zeros(sizes.numel()).index_add_(0, group, values)


ADVANTAGES: Mapping[str, Callable[..., Advantages]] = {
    "grpo": grpo,
}
