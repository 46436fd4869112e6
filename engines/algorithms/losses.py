"""Policy losses, how each is called and what it needs; and the critic's loss.

A method maps a micro-batch to the loss of every token (`loss(batch, **params) -> TokenLoss`, values
[T]); what becomes of the tokens is in aggregation.py, the sum of all terms in objective.py. The
critic's loss, `value_loss`, is one number already. A new method is one function and one line in
POLICY_LOSSES, or a user's import path to either.

A is the advantage, r = pi / pi_old of a token, sg stops gradients. Where not said otherwise, log r is
bounded by 20 nats in absolute value, without gradient beyond. `level` is "token", or "sequence" for
the geometric mean of a row's ratios as r of each of its tokens (TRL's importance_sampling_level).
clip_low and clip_high bound r by 1 - clip_low and 1 + clip_high. Metrics are means over the tokens
with mask 1: shares of tokens, where not said otherwise.

Losses with one ratio per row (GSPO, the geometric mean, LUSPO, VESPO) are exact on any micro-batch,
since no row is split over several. Losses that treat some tokens apart have a `select_*`, which is
given the mini-batch of all ranks and whose answer comes back as PolicyBatch.selected; without it a
loss chooses within its micro-batch, as verl does. Clip-Cov and KL-Cov hold back the tokens whose
advantage and log-prob move together the most ("The Entropy Mechanism of RL", arXiv:2505.22617);
M2PO leaves out those that moved the furthest ("Prosperity before Collapse", arXiv:2510.01161).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.algorithms.aggregation import (
    MetricSums,
    Normaliser,
    Rows,
    aggregate,
    masked_mean,
    mean_over,
)
from engines.algorithms.inputs import LOG_RATIO_BOUND, PolicyBatch, TokenLoss, ratio_metrics
from engines.algorithms.kl import inside_trust_region, k3
from engines.algorithms.rollout_correction import Mismatch

GSPO_BOUND = 10.0  # nats, on log s from above only (verl)
SMALLEST_WEIGHT = 1e-8  # of a row, in VESPO's kernel (TRL)


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
    mask = torch.ones_like(batch.mask) if weight_cap is None else weights <= weight_cap
    return TokenLoss(
        values=base.values * torch.where(mask, weights, 0.0),
        metrics=base.metrics + MetricSums(means={"weight_cap_share": mean_over(~mask, batch.mask)}),
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


def gspo(batch: PolicyBatch, *, clip_low: float, clip_high: float) -> TokenLoss:
    """GSPO: PPO's clip on the geometric mean of a row's ratios.

    s = exp(mean_t log r_t); token by token s_t = sg(s) pi / sg(pi), which has s's value and the
    token's gradient; l = max(-A s_t, -A clip(s_t, 1 - low, 1 + high)). arXiv:2507.18071.
    log s_t is bounded by 10 nats from above.

    Args:
        batch: a micro-batch.
        clip_low: s is clipped below 1 - clip_low.
        clip_high: s is clipped above 1 + clip_high.
    """
    log_ratio = batch.log_ratio(bound=None)
    row_mean = batch.rows.masked_mean(log_ratio.detach(), batch.mask)
    logprobs = batch.under_mask(batch.logprobs)
    log_sequence = (logprobs - logprobs.detach() + batch.rows.spread(row_mean)).clamp(
        max=GSPO_BOUND
    )
    result = clipped_surrogate(batch, log_sequence, clip_low=clip_low, clip_high=clip_high)
    kl_old = {"kl_old": mean_over(-log_ratio, batch.mask)}  # of the tokens, not of the rows
    metrics = dataclasses.replace(result.metrics, means={**result.metrics.means, **kl_old})
    return TokenLoss(values=result.values, metrics=metrics)


def luspo(batch: PolicyBatch, *, clip_low: float, clip_high: float, level: str) -> TokenLoss:
    """LUSPO: the clipped loss summed over a row's tokens, so that length does not dilute it.

    l_t = max(-A s, -A clip(s, 1 - low, 1 + high)), s the row's ratio (level "sequence", as in GSPO)
    or the token's; aggregated by row-mean-token-sum. arXiv:2602.05261.

    Args:
        batch: a micro-batch.
        clip_low: s is clipped below 1 - clip_low.
        clip_high: s is clipped above 1 + clip_high.
        level: "sequence" or "token".
    """
    return clipped_surrogate(
        batch, batch.log_ratio_at(level), clip_low=clip_low, clip_high=clip_high
    )


def geo_mean(batch: PolicyBatch, *, clip_low: float, clip_high: float) -> TokenLoss:
    """GMPO: the geometric mean of ratios that are clipped token by token in log space.

    L_i = -A_i exp(mean_t c_t), c_t = sign(A) min(sign(A) log r, sign(A) clip(log r, -low, high));
    A_i is the mean of the row's advantages. Every token carries L_i, so the mean over a row's
    tokens is L_i. Weights enter by their geometric mean over the row. arXiv:2507.20673.
    The log ratio is not bounded otherwise.

    Args:
        batch: a micro-batch; its weights are applied here.
        clip_low: nats; the log ratio is clipped below -clip_low.
        clip_high: nats; the log ratio is clipped above clip_high.
    """
    log_ratio, advantages = batch.log_ratio(bound=None), batch.signal()
    bounded = log_ratio.clamp(-clip_low, clip_high)
    sign = advantages.sign()
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * bounded)
    per_row = -batch.rows.masked_mean(advantages, batch.mask) * (
        batch.rows.masked_mean(pessimistic, batch.mask).exp()
    )
    if batch.weights is not None:
        log_weights = (batch.under_mask(batch.weights.detach()) + 1e-10).log()
        per_row = per_row * batch.rows.masked_mean(log_weights, batch.mask).exp()
    outside = log_ratio != bounded
    return TokenLoss(
        values=batch.rows.spread(per_row),
        metrics=ratio_metrics(
            batch,
            log_ratio,
            clip_share_high=outside & (advantages > 0),
            clip_share_low=outside & (advantages < 0),
        ),
    )


def vespo(
    batch: PolicyBatch,
    *,
    k_positive: float,
    lambda_positive: float,
    k_negative: float,
    lambda_negative: float,
) -> TokenLoss:
    """VESPO: a row's importance weight w, reshaped by a gamma kernel, on the policy gradient.

    l = -sg(phi(w)) A log pi, phi(w) = exp(lambda) w^k exp(-lambda w), k and lambda by the sign of A;
    w = prod_t r_t (times the correction weights), log w within [log 1e-8, 20]. arXiv:2602.10693.

    Args:
        batch: a micro-batch; its weights are applied here.
        k_positive: k, the kernel's shape, where A >= 0.
        lambda_positive: lambda, the kernel's rate, where A >= 0.
        k_negative: k where A < 0.
        lambda_negative: lambda where A < 0.

    Returns:
        Loss [T] and metrics; kernel: the mean of phi(w).
    """
    log_ratio, advantages = batch.log_ratio(), batch.signal()
    total = batch.rows.masked_sum(log_ratio.detach(), batch.mask)
    if batch.weights is not None:
        log_weights = batch.under_mask(batch.weights.detach()).clamp(min=SMALLEST_WEIGHT).log()
        log_weights = log_weights.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        total = total + batch.rows.masked_sum(log_weights, batch.mask)
    log_weight = batch.rows.spread(total.clamp(math.log(SMALLEST_WEIGHT), LOG_RATIO_BOUND))
    k = torch.where(advantages >= 0, k_positive, k_negative)
    rate = torch.where(advantages >= 0, lambda_positive, lambda_negative)
    kernel = torch.exp(rate + k * log_weight - rate * log_weight.exp())
    values = -kernel * advantages * batch.under_mask(batch.logprobs)
    return TokenLoss(values=values, metrics=ratio_metrics(batch, log_ratio, kernel=kernel))


def covariance(batch: PolicyBatch) -> Tensor:
    """(A - mean A)(log pi - mean log pi), per token [T], means over the tokens with mask 1."""
    advantages, logprobs = batch.signal(), batch.under_mask(batch.logprobs.detach())
    mean_advantage, mean_logprob = (masked_mean(x, batch.mask) for x in (advantages, logprobs))
    return (advantages - mean_advantage) * (logprobs - mean_logprob)


def select_clip_cov(
    batch: PolicyBatch,
    *,
    clip_low: float,
    clip_high: float,
    ratio: float,
    lower: float,
    upper: float,
) -> Tensor:
    """max(ratio T, 1) tokens at random of those with lower < covariance < upper.

    Tokens that the ratio's clip holds back already are no candidates. The choice is drawn from a
    generator that the candidates seed, so that every rank, and a replay, makes the same.

    Args:
        batch: the mini-batch of all ranks.
        clip_low: the ratio's clip, as in `clip_cov`.
        clip_high: likewise.
        ratio: share of the T tokens with mask 1.
        lower: bound on the covariance, in nats (advantages have no unit).
        upper: likewise.

    Returns:
        bool [T].
    """
    candidates = _clip_candidates(batch, clip_low, clip_high, lower, upper)
    allowed = max(int(ratio * int(batch.mask.sum())), 1)
    if int(candidates.sum()) <= allowed:
        return candidates
    places = candidates.nonzero().squeeze(-1)
    generator = torch.Generator().manual_seed(int(places.sum()))
    order = torch.randperm(places.numel(), generator=generator)[:allowed].to(places.device)
    chosen = torch.zeros_like(candidates)
    chosen[places[order]] = True
    return chosen


def _clip_candidates(
    batch: PolicyBatch, clip_low: float, clip_high: float, lower: float, upper: float
) -> Tensor:
    moves_together, pi_ratio = covariance(batch), batch.log_ratio(bound=None).detach().exp()
    held_low, held_high = clip_sides(batch.signal(), pi_ratio, 1 - clip_low, 1 + clip_high)
    within = (moves_together > lower) & (moves_together < upper)
    return batch.mask & ~held_low & ~held_high & within


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

    Args:
        batch: a micro-batch.
        clip_low: the ratio is clipped below 1 - clip_low.
        clip_high: the ratio is clipped above 1 + clip_high.
        ratio: as in `select_clip_cov`.
        lower: as there.
        upper: as there.

    Returns:
        Loss [T] and metrics; covariance_share: of the tokens that were left out.
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
    """The max(ratio T, 1) tokens with the largest covariance: bool [T].

    Args:
        batch: the mini-batch of all ranks.
        ratio: share of the T tokens with mask 1.
        coefficient: of the loss; has no part in the choice.
    """
    total = int(batch.mask.sum())
    chosen = torch.zeros_like(batch.mask)
    if total:
        largest = torch.where(batch.mask, covariance(batch), float("-inf"))
        chosen[largest.topk(max(int(total * ratio), 1)).indices] = True
    return chosen


def kl_cov(batch: PolicyBatch, *, ratio: float, coefficient: float) -> TokenLoss:
    """The unclipped loss, with a penalty on the change of the chosen tokens.

    l = -A r + [chosen] coefficient |log r|; log r is not bounded.

    Args:
        batch: a micro-batch.
        ratio: as in `select_kl_cov`.
        coefficient: weight of the penalty, per nat.

    Returns:
        Loss [T] and metrics; covariance_share: of the tokens that were chosen; log_ratio_abs: the
        mean |log r|, in nats.
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


def select_m2po(batch: PolicyBatch, *, threshold: float) -> Tensor:
    """The tokens that M2PO leaves out: bool [T].

    Among the tokens that push against the trust region (A > 0 and r > 1, or A < 0 and r < 1), those
    with the largest (log r)^2 are left out, as few as bring the mean of the rest to the threshold.

    Args:
        batch: the mini-batch of all ranks.
        threshold: bound on the mean of (log r)^2 over the pushing tokens that stay, in nats^2.
    """
    log_ratio, advantages = batch.log_ratio().detach(), batch.signal()
    pushing = batch.mask & (advantages * log_ratio > 0)
    moments = torch.where(pushing, log_ratio.double().square(), 0.0)
    ordered, order = moments.sort(descending=True)  # the other tokens follow, with moment 0
    count = int(pushing.sum())
    if count == 0:
        return pushing
    ordered = ordered[:count]
    sums = ordered.flip(0).cumsum(0).flip(0)
    counts = torch.arange(count, 0, -1, device=sums.device)
    too_much = sums / counts > threshold  # holds for a prefix: the mean of the rest decreases
    chosen = torch.zeros_like(pushing)
    chosen[order[:count][too_much]] = True
    return chosen & pushing


def m2po(batch: PolicyBatch, *, threshold: float) -> TokenLoss:
    """M2PO: l = -A r, left out (0) at the tokens of `select_m2po`. arXiv:2510.01161.

    r is the ratio to PolicyBatch.old_logprobs; with algorithm.ratio_against = rollout_logprobs it is
    the ratio to the behaviour policy, as in the paper.

    Args:
        batch: a micro-batch.
        threshold: as in `select_m2po`.

    Returns:
        Loss [T] and metrics; clip_share: of the tokens that were left out; second_moment: the mean
        (log r)^2 over all tokens, in nats^2.
    """
    chosen = batch.selected
    if chosen is None:
        chosen = select_m2po(batch, threshold=threshold)
    log_ratio = batch.log_ratio()
    values = -batch.signal() * log_ratio.exp()
    return TokenLoss(
        values=torch.where(chosen, 0.0, values),
        metrics=ratio_metrics(
            batch, log_ratio, clip_share=chosen, second_moment=log_ratio.square()
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """A method: how to call it and what it needs."""

    loss: Callable[..., TokenLoss]  # loss(batch, **params) -> TokenLoss
    aggregation: str | None = None  # the only aggregation that the method has; None: any
    needs: tuple[str, ...] = ()  # columns of PolicyBatch beyond logprobs, advantages, old_logprobs
    # select(mini_batch, **params) -> bool [T]: for methods whose choice of tokens is made over the
    # whole mini-batch; its result is handed to the loss as PolicyBatch.selected.
    select: Callable[..., Tensor] | None = None
    ratio: bool = True  # pi / pi_old is in the loss: against the rollout policy, it corrects itself
    own_weights: bool = False  # the method applies PolicyBatch.weights itself


POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "clipped": PolicyLoss(loss=clipped),
    "gspo": PolicyLoss(loss=gspo),
    "cispo": PolicyLoss(loss=cispo),
    "sapo": PolicyLoss(loss=sapo, aggregation="seq-mean-token-mean"),
    "gmpo": PolicyLoss(loss=geo_mean, aggregation="row-mean-token-mean", own_weights=True),
    "luspo": PolicyLoss(loss=luspo, aggregation="row-mean-token-sum"),
    "vespo": PolicyLoss(loss=vespo, own_weights=True),
    "clip_cov": PolicyLoss(loss=clip_cov, select=select_clip_cov),
    "kl_cov": PolicyLoss(loss=kl_cov, select=select_kl_cov),
    "dppo_tv": PolicyLoss(loss=dppo_tv),
    "dppo_kl": PolicyLoss(loss=dppo_kl),
    "dro": PolicyLoss(loss=dro),
    "cpgd": PolicyLoss(loss=cpgd),
    "m2po": PolicyLoss(loss=m2po, select=select_m2po),
    "decoupled": PolicyLoss(loss=decoupled, needs=("rollout_logprobs",)),
    "gpg": PolicyLoss(loss=reinforce, ratio=False),
    "reinforce": PolicyLoss(loss=reinforce, ratio=False),
}


def value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor,
    mask: Tensor,
    rows: Rows,
    normaliser: Normaliser,
    *,
    clip: float | None,
    aggregation: str,
) -> tuple[Tensor, MetricSums]:
    """1/2 max((V - R)^2, (V_clipped - R)^2), V_clipped = clip(V, V_old - clip, V_old + clip).

    PPO's, as in its reference implementation; arXiv:1707.06347.

    Args:
        values: V [T] of the critic that trains, in units of reward, with gradient.
        returns: R [T], its targets.
        old_values: V_old [T] of the critic before the update.
        mask: bool [T]; what stands under False is never used.
        rows: N rows, T tokens.
        normaliser: the counts of the mini-batch.
        clip: bound on a value's change, in units of reward; None: the plain squared error.
        aggregation: a mode of `aggregate`.

    Returns:
        The loss (scalar with gradient), and as metrics the loss and means over the tokens with mask
        1: value_clip_share (the clipped term is the larger), value_error (V - R)^2, value_mean,
        return_mean.
    """
    values, returns, old_values = (
        torch.where(mask, x, 0.0) for x in (values, returns.detach(), old_values.detach())
    )
    plain = (values - returns).square()
    squares, clipped = plain, plain
    if clip is not None:
        bounded = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
        clipped = (bounded - returns).square()
        squares = torch.maximum(plain, clipped)
    loss = aggregate(0.5 * squares, mask, rows, normaliser, aggregation)
    metrics = MetricSums(
        means={
            "value_clip_share": mean_over(clipped > plain, mask),
            "value_error": mean_over(plain, mask),
            "value_mean": mean_over(values, mask),
            "return_mean": mean_over(returns, mask),
        },
        sums={"value_loss": loss.detach() / normaliser.ranks},
    )
    return loss, metrics
