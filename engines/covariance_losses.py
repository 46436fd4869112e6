"""Clip-Cov and KL-Cov: tokens whose advantage and log-prob move together the most are held back.

Both choose tokens over the whole mini-batch (`select_*`). Without a choice handed in, they choose
within the micro-batch, as verl does. "The Entropy Mechanism of RL", arXiv:2505.22617.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engines.metric_sums import MetricSums, mean_over
from engines.policy_batch import PolicyBatch, TokenLoss, ratio_metrics
from engines.ratio_losses import clipped_surrogate


def covariance(batch: PolicyBatch) -> Tensor:
    """(A - mean A)(log pi - mean log pi), per token [T], means over the tokens with mask 1."""
    count = batch.mask.sum().clamp(min=1)
    advantages, logprobs = batch.signal(), batch.under_mask(batch.logprobs.detach())
    return (advantages - advantages.sum() / count) * (logprobs - logprobs.sum() / count)


def select_clip_cov(
    batch: PolicyBatch,
    *,
    clip_low: float,
    clip_high: float,
    ratio: float,
    lower: float,
    upper: float,
) -> Tensor:
    """bool [T]: max(ratio T, 1) tokens at random of those with lower < covariance < upper.

    Tokens that the ratio's clip holds back already are no candidates. The choice is drawn from a
    generator that the candidates seed, so that every rank, and a replay, makes the same.
    """
    candidates = _clip_candidates(batch, clip_low, clip_high, lower, upper)
    allowed = max(int(ratio * int(batch.mask.sum())), 1)
    if int(candidates.sum()) <= allowed:
        return candidates
    places = candidates.nonzero().squeeze(-1)
    generator = torch.Generator().manual_seed(int(places.sum()))
    drawn = torch.randperm(places.numel(), generator=generator)[:allowed].to(places.device)
    chosen = torch.zeros_like(candidates)
    chosen[places[drawn]] = True
    return chosen


def _clip_candidates(
    batch: PolicyBatch, clip_low: float, clip_high: float, lower: float, upper: float
) -> Tensor:
    moves_together = covariance(batch)
    pi_ratio, advantages = batch.log_ratio(bound=None).detach().exp(), batch.signal()
    bounded = pi_ratio.clamp(1 - clip_low, 1 + clip_high)
    was_clipped = -advantages * bounded > -advantages * pi_ratio
    return batch.mask & ~was_clipped & (moves_together > lower) & (moves_together < upper)


def clip_cov(
    batch: PolicyBatch,
    *,
    clip_low: float,
    clip_high: float,
    ratio: float,
    lower: float,
    upper: float,
) -> TokenLoss:
    """PPO's clipped loss with the chosen tokens left out: l = 0 there.

    l = max(-A r, -A clip(r, 1 - low, 1 + high)); log r is not bounded.
    """
    chosen = batch.selected
    if chosen is None:
        chosen = select_clip_cov(
            batch,
            clip_low=clip_low,
            clip_high=clip_high,
            ratio=ratio,
            lower=lower,
            upper=upper,
        )
    log_ratio = batch.log_ratio(bound=None)
    base = clipped_surrogate(batch, log_ratio, clip_low=clip_low, clip_high=clip_high)
    return TokenLoss(
        values=torch.where(chosen, 0.0, base.values),
        metrics=base.metrics
        + MetricSums(means={"covariance_share": mean_over(chosen, batch.mask)}),
    )


def select_kl_cov(batch: PolicyBatch, *, ratio: float, coefficient: float) -> Tensor:
    """bool [T]: the max(ratio T, 1) tokens with the largest covariance."""
    total = int(batch.mask.sum())
    chosen = torch.zeros_like(batch.mask)
    if total:
        largest = torch.where(batch.mask, covariance(batch), float("-inf"))
        chosen[largest.topk(max(int(total * ratio), 1)).indices] = True
    return chosen


def kl_cov(batch: PolicyBatch, *, ratio: float, coefficient: float) -> TokenLoss:
    """The unclipped loss, with a penalty on the change of the chosen tokens.

    l = -A r + [chosen] coefficient |log r|; log r is not bounded.
    """
    chosen = batch.selected
    if chosen is None:
        chosen = select_kl_cov(batch, ratio=ratio, coefficient=coefficient)
    log_ratio = batch.log_ratio(bound=None)
    penalty = torch.where(chosen, coefficient * log_ratio.abs(), 0.0)
    return TokenLoss(
        values=-batch.signal() * log_ratio.exp() + penalty,
        metrics=ratio_metrics(
            batch, log_ratio, covariance_share=chosen, log_ratio_abs=log_ratio.abs()
        ),
    )
