"""Policy losses: the loss of every token. Aggregation and normalisers are in aggregation.py.

A method is one function and one line in POLICY_LOSSES.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.metric_sums import MetricSums, largest_of, mean_over
from engines.policy_batch import PolicyBatch, TokenLoss

LOG_RATIO_BOUND = 20.0  # nats; beyond it the ratio is constant, so exp cannot overflow


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """A method: how to call it and what it needs."""

    loss: Callable[..., TokenLoss]  # loss(batch, **params) -> TokenLoss
    aggregation: str | None = None  # the only aggregation that the method has; None: any
    needs: tuple[str, ...] = ()  # columns of PolicyBatch beyond logprobs, advantages, old_logprobs
    # select(mini_batch, **params) -> bool [T]: for methods whose choice of tokens is made over the
    # whole mini-batch; its result is handed to the loss as PolicyBatch.selected.
    select: Callable[..., Tensor] | None = None


def clipped(
    batch: PolicyBatch, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    """PPO's clipped surrogate, with clip-higher and dual clip.

    l = max(-A r, -A clip(r, 1 - low, 1 + high)); where A < 0 also l = min(l, -A c).
    PPO arXiv:1707.06347; clip-higher (DAPO) arXiv:2503.14476; dual clip arXiv:1912.09729.
    r = exp(log pi / pi_old), the exponent bounded by 20 nats.
    """
    log_ratio = batch.log_ratio().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio, advantages = log_ratio.exp(), batch.advantages.where(batch.mask, 0.0)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    values = torch.maximum(plain, bounded)
    clip_share = bounded > plain
    lower = torch.zeros_like(clip_share)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        lower = (values > ceiling) & (advantages < 0)
        values = torch.where(advantages < 0, torch.minimum(values, ceiling), values)
    return TokenLoss(
        values=values,
        metrics=ratio_metrics(batch, log_ratio)
        + MetricSums(
            means={
                "clip_share": mean_over(clip_share, batch.mask),
                "clip_share_lower": mean_over(lower, batch.mask),
            }
        ),
    )


def reinforce(batch: PolicyBatch) -> TokenLoss:
    """Plain policy gradient: l = -A log pi. Williams 1992, doi:10.1007/BF00992696."""
    values = -batch.advantages.where(batch.mask, 0.0) * batch.logprobs.where(batch.mask, 0.0)
    return TokenLoss(values=values, metrics=ratio_metrics(batch, batch.log_ratio()))


def ratio_metrics(batch: PolicyBatch, log_ratio: Tensor) -> MetricSums:
    """KL of the old policy from the new by k1 (mean of -log ratio), and the largest ratio."""
    return MetricSums(
        means={"kl_old": mean_over(-log_ratio, batch.mask)},
        maxima={"ratio_max": largest_of(log_ratio.detach().exp(), batch.mask)},
    )


POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "clipped": PolicyLoss(loss=clipped),
    "reinforce": PolicyLoss(loss=reinforce),
}


def with_mask(batch: PolicyBatch, mask: Tensor) -> PolicyBatch:
    """The batch with fewer tokens counted."""
    return dataclasses.replace(batch, mask=mask)
