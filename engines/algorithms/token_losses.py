"""Policy losses with one ratio r = pi / pi_old per token. A is the advantage, sg stops gradients.

Each takes a PolicyBatch of T tokens and answers TokenLoss, whose values are [T]. Where not said
otherwise, log r is bounded by 20 nats in absolute value, without gradient beyond. `level` is "token",
or "sequence" for the geometric mean of a row's ratios as r of each of its tokens (TRL's
importance_sampling_level). clip_low and clip_high bound r by 1 - clip_low and 1 + clip_high. Metrics
are means over the tokens with mask 1: shares of tokens, where not said otherwise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engines.algorithms.aggregation import MetricSums, mean_over
from engines.algorithms.inputs import PolicyBatch, TokenLoss, ratio_metrics
from engines.algorithms.kl import inside_trust_region, k3
from engines.algorithms.rollout_correction import Mismatch


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
    PPO arXiv:1707.06347; clip-higher (DAPO) arXiv:2503.14476; dual clip arXiv:1912.09729; ratio_cap
    (TRL's delta) INTELLECT-2, arXiv:2505.07291.

    Args:
        batch: a micro-batch.
        clip_low: the ratio is clipped below 1 - clip_low.
        clip_high: the ratio is clipped above 1 + clip_high.
        dual_clip: bound on the ratio where A < 0; None: none.
        ratio_cap: bound from above on the ratio of the first term; None: none.
        level: "token" or "sequence".
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
    """The loss and metrics of `clipped` for a given log ratio [T], with gradient.

    clip_share_low, _high: the lower bound, the upper bound takes the token's gradient; clip_share:
    one of them does (verl's pg_clipfrac). They compare the ratio after ratio_cap with the bounds, as
    TRL does with delta: what the cap alone holds back is in none of them. dual_clip_share: the dual
    clip holds the loss.
    """
    ratio, advantages = log_ratio.exp(), batch.signal()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    free = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    low, high = clip_sides(advantages, free, 1 - clip_low, 1 + clip_high)
    values = torch.maximum(-advantages * free, -advantages * bounded)
    beyond = torch.zeros_like(low)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        beyond = (values > ceiling) & (advantages < 0)
        values = torch.where(advantages < 0, torch.minimum(values, ceiling), values)
    return TokenLoss(
        values=values,
        metrics=ratio_metrics(
            batch,
            log_ratio,
            clip_share=low | high,
            clip_share_low=low,
            clip_share_high=high,
            dual_clip_share=beyond,
        ),
    )


def clip_sides(
    advantages: Tensor, ratio: Tensor, lower: float, upper: float
) -> tuple[Tensor, Tensor]:
    """Tokens that a clip holds back, by its lower and by its upper bound: bool [T] each.

    A token is held back where a further move would be in the direction of its advantage.

    Args:
        advantages: [T].
        ratio: [T], the ratio or its logarithm.
        lower: bound on the same scale, for A < 0.
        upper: bound on the same scale, for A > 0.
    """
    return (ratio < lower) & (advantages < 0), (ratio > upper) & (advantages > 0)


def decoupled(
    batch: PolicyBatch,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    weight_cap: float | None,
) -> TokenLoss:
    """Decoupled PPO: the proximal policy bounds the step, the behaviour policy weighs the sample.

    l = w max(-A r, -A clip(r, 1 - low, 1 + high)), w = pi_old / pi_rollout, detached. Hilton et al.
    arXiv:2110.00641; AReaL arXiv:2505.24298.

    Args:
        batch: a micro-batch with rollout_logprobs; where one is not known (NaN), w = 1.
        clip_low: as in `clipped`.
        clip_high: as in `clipped`.
        dual_clip: as in `clipped`.
        weight_cap: tokens with a larger w are left out (AReaL's behav_imp_weight_cap); None: none.
            Their share is the metric weight_cap_share.
    """
    assert batch.rollout_logprobs is not None, "decoupled PPO needs rollout_logprobs"
    base = clipped_surrogate(
        batch, batch.log_ratio(), clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    behaviour = Mismatch(
        rows=batch.rows,
        mask=batch.mask,
        logprobs=batch.proximal,
        rollout_logprobs=batch.rollout_logprobs,
    )
    weights = behaviour.log_ratio().exp()
    kept = torch.ones_like(batch.mask) if weight_cap is None else weights <= weight_cap
    return TokenLoss(
        values=base.values * torch.where(kept, weights, 0.0),
        metrics=base.metrics + MetricSums(means={"weight_cap_share": mean_over(~kept, batch.mask)}),
    )


def cispo(batch: PolicyBatch, *, clip_low: float | None, clip_high: float, level: str) -> TokenLoss:
    """CISPO: the ratio is clipped and detached, so that every token keeps its gradient.

    l = -sg(clip(r, 1 - low, 1 + high)) A log pi. MiniMax-M1, arXiv:2506.13585.

    Args:
        batch: a micro-batch.
        clip_low: as in `clipped`; None leaves the ratio free from below, as the paper does.
        clip_high: as in `clipped`.
        level: "token" or "sequence".
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

    l = -A (4 / tau) sigmoid(tau (r - 1)). arXiv:2511.20347.

    Args:
        batch: a micro-batch.
        tau_positive: tau where A > 0; the larger, the sooner the gradient fades.
        tau_negative: tau where A <= 0.
        level: "token" or "sequence".
    """
    log_ratio, advantages = batch.log_ratio_at(level), batch.signal()
    tau = torch.where(advantages > 0, tau_positive, tau_negative).to(advantages.dtype)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * (4 / tau)
    return TokenLoss(values=-gate * advantages, metrics=ratio_metrics(batch, log_ratio))


def dppo_tv(
    batch: PolicyBatch, *, divergence_low: float, divergence_high: float, ratio_cap: float
) -> TokenLoss:
    """DPPO with the total variation of the sampled token as trust region.

    l = -m A sg(min(r, cap)) log pi, m = kl.inside_trust_region. arXiv:2602.04879.

    Args:
        batch: a micro-batch.
        divergence_low: largest loss of probability where A <= 0.
        divergence_high: largest gain of probability where A > 0.
        ratio_cap: bound on r from above.
    """
    return _inside_region(batch, "tv", divergence_low, divergence_high, ratio_cap)


def dppo_kl(
    batch: PolicyBatch, *, divergence_low: float, divergence_high: float, ratio_cap: float
) -> TokenLoss:
    """As dppo_tv, with the binary KL (this token or any other) as trust region.

    Args:
        batch: a micro-batch.
        divergence_low: largest KL of a falling token where A <= 0, in nats.
        divergence_high: largest KL of a rising token where A > 0, in nats.
        ratio_cap: bound on r from above.
    """
    return _inside_region(batch, "kl", divergence_low, divergence_high, ratio_cap)


def _inside_region(
    batch: PolicyBatch, measure: str, low: float, high: float, ratio_cap: float
) -> TokenLoss:
    logprobs = batch.under_mask(batch.logprobs)
    inside = inside_trust_region(
        logprobs.detach(),
        batch.under_mask(batch.proximal),
        batch.signal(),
        measure=measure,
        low=low,
        high=high,
    )
    log_ratio = batch.log_ratio()
    ratio = log_ratio.exp().detach()
    policy_gradient = -batch.signal() * logprobs
    return TokenLoss(
        values=torch.where(inside, policy_gradient * ratio.clamp(max=ratio_cap), 0.0),
        metrics=ratio_metrics(
            batch, log_ratio, clip_share=~inside, ratio_cap_share=(ratio > ratio_cap) & inside
        ),
    )


def dro(batch: PolicyBatch, *, beta: float) -> TokenLoss:
    """DRO: a quadratic penalty on the log ratio (not bounded) instead of a clip.

    l = -A log pi + beta / 2 (log r)^2. Direct reward optimisation, arXiv:2405.19107.

    Args:
        batch: a micro-batch.
        beta: weight of the penalty, per nat^2.
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
    D the k3 estimate of KL(pi_old, pi) with the gradient min(r - 1, cap) grad log pi.
    arXiv:2505.12504.

    Args:
        batch: a micro-batch.
        clip_low: log r is clipped below log(1 - clip_low).
        clip_high: log r is clipped above log(1 + clip_high).
        drift_coefficient: c, per nat.
        drift_cap: largest slope of D.
    """
    log_ratio, advantages = batch.log_ratio(), batch.signal()
    lower, upper = math.log1p(-clip_low), math.log1p(clip_high)
    bounded = log_ratio.clamp(lower, upper)
    values = torch.maximum(-advantages * log_ratio, -advantages * bounded)
    slope = (log_ratio.detach().exp() - 1).clamp(max=drift_cap) * log_ratio
    drift = slope + (k3(log_ratio.detach()) - slope.detach())
    return TokenLoss(
        values=values + drift_coefficient * drift,
        metrics=ratio_metrics(
            batch,
            log_ratio,
            clip_share=torch.logical_or(*clip_sides(advantages, log_ratio, lower, upper)),
            drift=drift,
        ),
    )


def reinforce(batch: PolicyBatch) -> TokenLoss:
    """Plain policy gradient: l = -A log pi. The loss of GPG too (arXiv:2504.02546).

    Williams 1992, doi:10.1007/BF00992696.
    """
    values = -batch.signal() * batch.under_mask(batch.logprobs)
    return TokenLoss(values=values, metrics=ratio_metrics(batch, batch.log_ratio(bound=None)))
