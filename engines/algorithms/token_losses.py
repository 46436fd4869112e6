"""Policy losses with one ratio r = pi / pi_old per token. A is the advantage, sg stops gradients.

Where not said otherwise, log r is bounded by 20 nats in absolute value, without gradient beyond.
`level` = "sequence" takes the geometric mean of a row's ratios for r at each of its tokens (TRL's
importance_sampling_level).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engines.algorithms.inputs import PolicyBatch, TokenLoss, ratio_metrics
from engines.algorithms.metric_sums import MetricSums, mean_over


def clipped(
    batch: PolicyBatch,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    ratio_cap: float | None,
    level: str,
) -> TokenLoss:
    """PPO's clipped surrogate, with clip-higher and dual clip.

    l = max(-A r, -A clip(r, 1 - low, 1 + high)); where A < 0 also l <= -A dual_clip.
    PPO arXiv:1707.06347; clip-higher (DAPO) arXiv:2503.14476; dual clip arXiv:1912.09729.
    ratio_cap bounds the unclipped ratio from above (TRL's delta; INTELLECT-2, arXiv:2505.07291).
    """
    return clipped_surrogate(
        batch,
        batch.log_ratio_at(level),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        ratio_cap=ratio_cap,
    )


def clipped_surrogate(
    batch: PolicyBatch,
    log_ratio: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
) -> TokenLoss:
    """The clipped surrogate of a given log ratio [T], for methods that define their own."""
    ratio, advantages = log_ratio.exp(), batch.signal()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    free = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    values = torch.maximum(-advantages * free, -advantages * bounded)
    was_clipped = -advantages * bounded > -advantages * free
    beyond = torch.zeros_like(was_clipped)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        beyond = (values > ceiling) & (advantages < 0)
        values = torch.where(advantages < 0, torch.minimum(values, ceiling), values)
    return TokenLoss(
        values=values,
        metrics=ratio_metrics(
            batch,
            log_ratio,
            clip_share=was_clipped,
            clip_share_low=(ratio < 1 - clip_low) & (advantages < 0),
            clip_share_high=(ratio > 1 + clip_high) & (advantages > 0),
            dual_clip_share=beyond,
        ),
    )


def decoupled(
    batch: PolicyBatch,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    weight_cap: float | None,
) -> TokenLoss:
    """Decoupled PPO: the proximal policy bounds the step, the behaviour policy weighs the sample.

    l = w max(-A r, -A clip(r, 1 - low, 1 + high)), w = pi_old / pi_rollout, detached;
    tokens with w > weight_cap are left out (AReaL's behav_imp_weight_cap).
    Hilton et al. arXiv:2110.00641; AReaL arXiv:2505.24298.
    """
    assert batch.rollout_logprobs is not None, "decoupled PPO needs rollout_logprobs"
    base = clipped_surrogate(
        batch, batch.log_ratio(), clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    gap = batch.under_mask(batch.proximal) - batch.under_mask(batch.rollout_logprobs.detach())
    weights = gap.clamp(-20.0, 20.0).exp()
    kept = torch.ones_like(batch.mask) if weight_cap is None else weights <= weight_cap
    return TokenLoss(
        values=base.values * torch.where(kept, weights, 0.0),
        metrics=base.metrics + MetricSums(means={"weight_cap_share": mean_over(~kept, batch.mask)}),
    )


def cispo(batch: PolicyBatch, *, clip_low: float | None, clip_high: float, level: str) -> TokenLoss:
    """CISPO: the ratio is clipped and detached, so that every token keeps its gradient.

    l = -sg(clip(r, 1 - low, 1 + high)) A log pi; low = none leaves the ratio free from below.
    MiniMax-M1, arXiv:2506.13585.
    """
    log_ratio = batch.log_ratio_at(level)
    ratio = log_ratio.exp().detach()
    bounded = ratio.clamp(max=1 + clip_high)
    if clip_low is not None:
        bounded = bounded.clamp(min=1 - clip_low)
    values = -bounded * batch.signal() * batch.under_mask(batch.logprobs)
    return TokenLoss(
        values=values,
        metrics=ratio_metrics(
            batch,
            log_ratio,
            clip_share=ratio != bounded,
            clip_share_high=(ratio > 1 + clip_high) & (batch.signal() > 0),
        ),
    )


def sapo(batch: PolicyBatch, *, tau_positive: float, tau_negative: float, level: str) -> TokenLoss:
    """SAPO: a sigmoid gate instead of a clip.

    l = -A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A (A = 0 counts as negative).
    arXiv:2511.20347.
    """
    log_ratio, advantages = batch.log_ratio_at(level), batch.signal()
    tau = torch.where(advantages > 0, tau_positive, tau_negative).to(advantages.dtype)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * (4 / tau)
    return TokenLoss(values=-gate * advantages, metrics=ratio_metrics(batch, log_ratio))


def dppo_tv(
    batch: PolicyBatch, *, divergence_low: float, divergence_high: float, ratio_cap: float
) -> TokenLoss:
    """DPPO with the total variation of the sampled token as trust region.

    l = -m A sg(min(r, cap)) log pi; m = 0 where A > 0 and pi - pi_old > high, or A <= 0 and
    pi_old - pi > low. arXiv:2602.04879.
    """
    shift = _probability(batch, batch.logprobs) - _probability(batch, batch.proximal)
    inside = torch.where(batch.signal() > 0, shift <= divergence_high, shift >= -divergence_low)
    return _divergence_masked(batch, inside, ratio_cap)


def dppo_kl(
    batch: PolicyBatch, *, divergence_low: float, divergence_high: float, ratio_cap: float
) -> TokenLoss:
    """DPPO with the binary KL (this token or any other) as trust region.

    l = -m A sg(min(r, cap)) log pi; m = 0 where KL_2(pi_old, pi) is above high and pi > pi_old
    (A > 0), or above low and pi < pi_old (A <= 0). arXiv:2602.04879.
    """
    new, old = _probability(batch, batch.logprobs), _probability(batch, batch.proximal)
    difference = batch.under_mask(batch.proximal) - batch.under_mask(batch.logprobs.detach())
    divergence = old * difference + (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    inside = torch.where(
        batch.signal() > 0,
        (divergence <= divergence_high) | (new <= old),
        (divergence <= divergence_low) | (new >= old),
    )
    return _divergence_masked(batch, inside, ratio_cap)


def _probability(batch: PolicyBatch, logprobs: Tensor) -> Tensor:
    return batch.under_mask(logprobs.detach()).exp()


def _divergence_masked(batch: PolicyBatch, inside: Tensor, ratio_cap: float) -> TokenLoss:
    log_ratio = batch.log_ratio()
    ratio = log_ratio.exp().detach()
    policy_gradient = -batch.signal() * batch.under_mask(batch.logprobs)
    return TokenLoss(
        values=torch.where(inside, policy_gradient * ratio.clamp(max=ratio_cap), 0.0),
        metrics=ratio_metrics(
            batch, log_ratio, clip_share=~inside, ratio_cap_share=(ratio > ratio_cap) & inside
        ),
    )


def dro(batch: PolicyBatch, *, beta: float) -> TokenLoss:
    """DRO: a quadratic penalty on the log ratio (not bounded) instead of a clip.

    l = -A log pi + beta / 2 (log r)^2. Direct reward optimisation, arXiv:2405.19107.
    """
    log_ratio = batch.log_ratio(bound=None)
    policy_gradient = -batch.signal() * batch.under_mask(batch.logprobs)
    return TokenLoss(
        values=policy_gradient + 0.5 * beta * log_ratio.square(),
        metrics=ratio_metrics(batch, log_ratio),
    )


def cpgd(
    batch: PolicyBatch,
    *,
    clip_low: float,
    clip_high: float,
    drift_coefficient: float,
    drift_cap: float,
) -> TokenLoss:
    """CPGD: a clipped log ratio and a drift term that pulls back to the old policy.

    l = max(-A log r, -A clip(log r, log(1 - low), log(1 + high))) + c D,
    D = r - 1 - log r, an estimate of KL(pi_old, pi), with the gradient min(r - 1, cap) grad log pi.
    arXiv:2505.12504.
    """
    log_ratio, advantages = batch.log_ratio(), batch.signal()
    bounded = log_ratio.clamp(math.log1p(-clip_low), math.log1p(clip_high))
    values = torch.maximum(-advantages * log_ratio, -advantages * bounded)
    was_clipped = -advantages * bounded > -advantages * log_ratio
    ratio = log_ratio.detach().exp()
    slope = (ratio - 1).clamp(max=drift_cap) * log_ratio
    drift = slope + (ratio - 1 - log_ratio.detach() - slope.detach())
    return TokenLoss(
        values=values + drift_coefficient * drift,
        metrics=ratio_metrics(batch, log_ratio, clip_share=was_clipped, drift=drift),
    )


def reinforce(batch: PolicyBatch) -> TokenLoss:
    """Plain policy gradient: l = -A log pi. The loss of GPG too (arXiv:2504.02546).

    Williams 1992, doi:10.1007/BF00992696.
    """
    values = -batch.signal() * batch.under_mask(batch.logprobs)
    return TokenLoss(values=values, metrics=ratio_metrics(batch, batch.log_ratio(bound=None)))
