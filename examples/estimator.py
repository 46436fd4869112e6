"""Advantage estimators of your own: pure functions of a whole batch, all groups complete.

    algorithm.advantage.kind=function algorithm.advantage.path=estimator.py:above_median

The workers of the data engine import this file, the flow's process does not.
"""

from __future__ import annotations

import torch

from engines.algorithms.inputs import AdvantageBatch, Advantages


def above_median(batch: AdvantageBatch, *, scale: float = 1.0) -> Advantages:
    """A_i = scale (r_i - median(r_g)): a single lucky sample does not move its group's baseline.

    Args:
        batch: N samples, T tokens; a sample without a reward (NaN) gets 0.
        scale: factor on the advantages, no unit; from algorithm.advantage.params.
    """
    advantages = torch.zeros_like(batch.rewards)
    for group in batch.groups.unique():
        members = (batch.groups == group) & batch.rewards.isfinite()
        rewards = batch.rewards[members]
        if rewards.numel():
            advantages[members] = scale * (rewards - rewards.quantile(0.5))
    return Advantages(advantages=batch.at_tokens(advantages))


def one(batch: AdvantageBatch) -> Advantages:
    """A = 1 for every token: with the loss `reinforce`, maximum likelihood of the samples kept."""
    return Advantages(advantages=batch.mask.to(batch.rewards.dtype))
