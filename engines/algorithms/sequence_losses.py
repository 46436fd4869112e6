"""Policy losses with one ratio per row, the geometric mean or the product of its tokens'.

A is the advantage, r_t the ratio pi / pi_old of a token, sg stops gradients; mean_t is over the row's
tokens with mask 1. A row is never split over micro-batches, so each of these is exact on any. The
results are the losses of tokens all the same, [T], for the aggregation to average. Metrics are means
over the tokens with mask 1.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from engines.algorithms.aggregation import mean_over
from engines.algorithms.inputs import LOG_RATIO_BOUND, PolicyBatch, TokenLoss, ratio_metrics
from engines.algorithms.token_losses import clipped_surrogate

GSPO_BOUND = 10.0  # nats, on log s from above only (verl)
SMALLEST_WEIGHT = 1e-8  # of a row, in VESPO's kernel (TRL)


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
    own = batch.under_mask(batch.logprobs)
    log_sequence = (own - own.detach() + batch.rows.spread(row_mean)).clamp(max=GSPO_BOUND)
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
    kept = sign * torch.minimum(sign * log_ratio, sign * bounded)
    per_row = -batch.rows.masked_mean(advantages, batch.mask) * (
        batch.rows.masked_mean(kept, batch.mask).exp()
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
