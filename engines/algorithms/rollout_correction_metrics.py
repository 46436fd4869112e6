"""How far the rollout engine is from the trainer, and what the corrections did about it.

Two kinds. Over a whole batch, before the update (`correction_metrics`): maxima, deviations and
quotients too, verl's rollout_corr/*. Over micro-batches, in the loss (`gap_sums`,
`correction_sums`): means only, which add up over micro-batches and ranks. rho = pi / pi_rollout.
A batch without a token of mask 1 has no metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engines.algorithms.aggregation import MetricSums, masked_mean, mean_over
from engines.algorithms.inputs import LOG_RATIO_BOUND
from engines.algorithms.jagged import divide
from engines.algorithms.kl import k1, k3
from engines.algorithms.rollout_correction import (
    Mismatch,
    Step,
    band,
    bounds_of,
    correct,
    divergence,
    mean_weight,
    raw_weights,
    reject,
    truncate,
)


def correction_metrics(mismatch: Mismatch, steps: Sequence[Step]) -> dict[str, float]:
    """The gap of the two policies, and of each step its own metrics: weights, rejections, shares.

    Args:
        mismatch: of the whole batch.
        steps: as for `correct`; of two steps of one kind the later one's metrics stand.
    """
    metrics = mismatch_metrics(mismatch)
    if not metrics or not steps:
        return metrics
    for function, params in steps:
        if function in (truncate, band):
            metrics |= _metrics_of_weights(mismatch, function, params)
        elif function is reject:
            metrics |= _metrics_of_rejection(mismatch, params)
    _, kept = correct(mismatch, steps)
    return metrics | kept_metrics(mismatch, kept)


def _metrics_of_weights(
    mismatch: Mismatch, function: Any, params: Mapping[str, Any]
) -> dict[str, float]:
    plain = function(mismatch, **{**params, "normalize": False})
    upper = math.inf if params["upper"] is None else params["upper"]
    return weight_metrics(mismatch, plain, params["level"], params["lower"], upper)


def _metrics_of_rejection(mismatch: Mismatch, params: Mapping[str, Any]) -> dict[str, float]:
    low, high = bounds_of(params["statistic"], params["lower"], params["upper"])
    kept = reject(mismatch, **params)
    return rejection_metrics(mismatch, kept, params["statistic"], low, high)


def mismatch_metrics(mismatch: Mismatch) -> dict[str, float]:
    """The gap of the two policies over a whole batch, log rho as it is but where said.

    kl and k3_kl: KL(rollout, train) by k1 and k3, in nats, mean over the tokens with mask 1. Mean
    over all rows, an empty one counted with log-prob 0: *_ppl of exp(-mean log-prob), *_log_ppl of
    -mean log-prob; log_ppl_diff: training minus rollout, *_abs_diff its absolute value, *_max and
    *_min its extremes; ppl_ratio: of exp(log_ppl_diff). chi2_token = mean rho^2 - 1 over the tokens,
    chi2_seq likewise over all rows with their products; log rho there within 20 nats.
    """
    rows, mask = mismatch.rows, mismatch.mask
    if not bool(mask.any()):
        return {}
    exact, log_ratio = mismatch.log_ratio(bound=None), mismatch.log_ratio()
    train = rows.masked_mean(mismatch.logprobs.detach(), mask)
    rollout = train - rows.masked_mean(exact, mask)
    gap = rollout - train
    row_ratio = rows.sum(exact).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    result = {
        "training_ppl": (-train).exp().mean(),
        "training_log_ppl": (-train).mean(),
        "rollout_ppl": (-rollout).exp().mean(),
        "rollout_log_ppl": (-rollout).mean(),
        "kl": masked_mean(k1(exact), mask),
        "k3_kl": masked_mean(k3(exact), mask),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": gap.exp().mean(),
        "chi2_token": masked_mean((2 * log_ratio).exp(), mask) - 1,
        "chi2_seq": (2 * row_ratio).exp().mean() - 1,
    }
    return {name: float(value) for name, value in result.items()}


def weight_metrics(
    mismatch: Mismatch, weights: Tensor, level: str, lower: float | None, upper: float
) -> dict[str, float]:
    """What `truncate` or `band` did over a whole batch.

    Args:
        mismatch: the two policies' log-probs [T].
        weights: [T], before normalisation.
        level: "token" or "sequence", as the weights were made.
        lower: bound of the weights; None: 1 / upper.
        upper: bound of the weights; may be inf.

    Returns:
        Means over the tokens with mask 1, and of the rows' means over all N rows (weight_seq_*).
        weight_eff_sample_size: of the weights, 1 at best. The shares high and low are of the raw
        ratio against the bounds: of tokens, or of all N rows for level "sequence".
    """
    rows, mask = mismatch.rows, mismatch.mask
    if not bool(mask.any()):
        return {}
    raw = raw_weights(mismatch, level).where(mask, 0.0)
    low = 1.0 / upper if lower is None else lower
    if level == "sequence":
        per_row = rows.sum(mismatch.log_ratio(bound=None))
        result = {
            "weight_max": per_row.max().clamp(max=LOG_RATIO_BOUND).exp(),
            "weight_min": per_row.min().exp(),
            "weight_ratio_fraction_high": (per_row.exp() > upper).float().mean(),
            "weight_ratio_fraction_low": (per_row.exp() < low).float().mean(),
        }
    else:
        result = {
            "weight_max": weights[mask].max(),
            "weight_min": weights[mask].min(),
            "weight_ratio_fraction_high": masked_mean(raw > upper, mask),
            "weight_ratio_fraction_low": masked_mean(raw < low, mask),
        }
    bounded = weights.clamp(0.0, upper)
    mean, square = masked_mean(bounded, mask), masked_mean(bounded.square(), mask)
    row_means, raw_means = rows.masked_mean(weights, mask), rows.masked_mean(raw, mask)
    result |= {
        "weight_mean": masked_mean(weights, mask),
        "weight_std": (square - mean.square()).clamp(min=0).sqrt(),
        "weight_eff_sample_size": effective_sample_size(mean, square),
        "weight_seq_mean": row_means.mean(),
        "weight_seq_std": _deviation(row_means),
        "weight_seq_max": row_means.max(),
        "weight_seq_min": row_means.min(),
        "weight_seq_max_deviation": (row_means - 1).abs().max(),
        "weight_seq_fraction_high": (raw_means > upper).float().mean(),
        "weight_seq_fraction_low": (raw_means < low).float().mean(),
        "weight_oob_ratio": masked_mean((raw < low) | (raw > upper), mask),
        "weight_batch_norm_factor": mean_weight(mismatch, weights, level),
    }
    return {name: float(value) for name, value in result.items()}


def rejection_metrics(
    mismatch: Mismatch, kept: Tensor, statistic: str, low: float | None, high: float
) -> dict[str, float]:
    """What one `reject` did over a whole batch.

    Args:
        mismatch: the two policies' log-probs [T].
        kept: bool [T], its verdicts.
        statistic: as in `divergence`.
        low: lower bound on the statistic's own scale, in nats (`bounds_of`); None: none.
        high: upper bound likewise.

    Returns:
        reject_<statistic>_*: mean, std and masked_fraction over the tokens with mask 1; extremes and
        fractions over these tokens, or over the rows that have any for a row's statistic; seq_* over
        such rows, of the row's statistic or of its token mean.
    """
    rows, mask = mismatch.rows, mismatch.mask
    if not bool(mask.any()):
        return {}
    value = divergence(mismatch, statistic)
    filled = rows.tokens(mask) > 0
    per_row = rows.masked_mean(value, mask)[filled]
    of_rows = statistic.startswith("seq")
    extremes = per_row if of_rows else value[mask]
    floor = 0.0 if low is None else low
    bounded = value.clamp(floor, high)
    mean, square = masked_mean(bounded, mask), masked_mean(bounded.square(), mask)
    row_hit = (rows.masked_sum((~kept).to(value.dtype), mask) > 0)[filled]
    result = {
        "mean": masked_mean(value, mask),
        "max": extremes.max(),
        "min": extremes.min(),
        "fraction_high": (extremes > high).float().mean(),
        "fraction_low": (extremes < floor).float().mean() * (low is not None),
        "std": (square - mean.square()).clamp(min=0).sqrt(),
        "seq_mean": per_row.mean(),
        "seq_std": _deviation(per_row),
        "seq_max": per_row.max(),
        "seq_min": per_row.min(),
        "seq_max_deviation": per_row.abs().max(),
        "seq_fraction_high": (per_row > high).float().mean(),
        "masked_fraction": masked_mean(~kept, mask),
        "seq_masked_fraction": row_hit.float().mean(),
    }
    if low is not None:
        result["seq_fraction_low"] = (per_row < low).float().mean()
    return {f"reject_{statistic}_{name}": float(number) for name, number in result.items()}


def kept_metrics(mismatch: Mismatch, kept: Tensor) -> dict[str, float]:
    """Share of tokens left out by all verdicts, and of rows (empty ones too) that lost a token."""
    lost = mismatch.mask & ~kept
    hit = mismatch.rows.sum(lost.to(mismatch.logprobs.dtype)) > 0
    return {
        "reject_masked_fraction": float(masked_mean(lost, mismatch.mask)),
        "reject_seq_masked_fraction": float(hit.float().mean()),
    }


def _deviation(values: Tensor) -> Tensor:
    return values.std() if values.numel() > 1 else values.new_zeros(())


def gap_sums(mismatch: Mismatch) -> MetricSums:
    """The gap of the two policies in a micro-batch, log rho within 20 nats.

    Means over the tokens with mask 1: kl_rollout_k1 and kl_rollout_k3, KL(rollout, train) in nats;
    rollout_ratio, rho, and rollout_ratio_squared, from which `sample_sizes` are made.
    Means over the rows that have such tokens: log_ppl_gap, the training policy's log perplexity less
    the rollout policy's, and ppl_ratio, exp of that.
    """
    log_ratio = mismatch.log_ratio()
    ratio = log_ratio.exp()
    gap = -mismatch.rows.masked_mean(log_ratio, mismatch.mask)
    filled = mismatch.rows.tokens(mismatch.mask) > 0
    return MetricSums(
        means={
            "kl_rollout_k1": mean_over(k1(log_ratio), mismatch.mask),
            "kl_rollout_k3": mean_over(k3(log_ratio), mismatch.mask),
            "rollout_ratio": mean_over(ratio, mismatch.mask),
            "rollout_ratio_squared": mean_over(ratio.square(), mismatch.mask),
            "log_ppl_gap": mean_over(gap, filled),
            "ppl_ratio": mean_over(gap.exp(), filled),
        }
    )


def correction_sums(
    mismatch: Mismatch, weights: Tensor, kept: Tensor | None, steps: Sequence[Step]
) -> MetricSums:
    """What the corrections did in a micro-batch.

    Args:
        mismatch: the two policies' log-probs [T].
        weights: [T], of `correct`.
        kept: bool [T], of `correct`; None: nothing is left out.
        steps: the corrections that made them.

    Returns:
        Means over the tokens with mask 1. correction_weight: the weight; correction_left_out: share
        without a part in the loss; correction_clipped_high, _low: shares whose ratio is beyond a
        bound of `truncate` or `band`; correction_factor (weight, 0 where left out) and
        correction_factor_squared, from which `sample_sizes` are made.
    """
    mask = mismatch.mask
    kept = mask if kept is None else mask & kept
    factor = torch.where(kept, weights, 0.0)
    high, low = torch.zeros_like(mask), torch.zeros_like(mask)
    for function, params in steps:
        if function in (truncate, band):
            above, below = _beyond(mismatch, params)
            high, low = high | above, low | below
    return MetricSums(
        means={
            "correction_weight": mean_over(weights, mask),
            "correction_left_out": mean_over(~kept, mask),
            "correction_clipped_high": mean_over(high, mask),
            "correction_clipped_low": mean_over(low, mask),
            "correction_factor": mean_over(factor, mask),
            "correction_factor_squared": mean_over(factor.square(), mask),
        }
    )


def _beyond(mismatch: Mismatch, params: Mapping[str, object]) -> tuple[Tensor, Tensor]:
    """bool [T] each: the ratio is above the upper bound of `truncate` or `band`, below the lower."""
    raw = raw_weights(mismatch, str(params["level"]))
    upper, lower = params["upper"], params["lower"]
    above = raw > upper if isinstance(upper, float) else torch.zeros_like(mismatch.mask)
    below = raw < lower if isinstance(lower, float) else torch.zeros_like(mismatch.mask)
    return above, below


def sample_sizes(metrics: Mapping[str, float]) -> dict[str, float]:
    """Effective sample sizes over the tokens of an update, each a share in [0, 1].

    rollout_effective_sample_size: of rho, as it is before any correction;
    correction_effective_sample_size: of the correction's factor. Each is left out where `metrics`
    have not what it is made of, and the first where there is no token.

    metrics: values of `gap_sums` and `correction_sums`, added up over the update.
    """
    found = {}
    for name, weight in (("rollout", "rollout_ratio"), ("correction", "correction_factor")):
        mean, square = (metrics.get(f"{weight}{end}") for end in ("", "_squared"))
        if mean is None or square is None or (weight == "rollout_ratio" and not square):
            continue
        size = effective_sample_size(
            torch.tensor(mean, dtype=torch.float64), torch.tensor(square, dtype=torch.float64)
        )
        found[f"{name}_effective_sample_size"] = float(size)
    return found


def effective_sample_size(mean: Tensor, mean_square: Tensor) -> Tensor:
    """Share of the samples that weighted ones are worth: (mean w)^2 / mean w^2 (Kish 1965).

    Args:
        mean: of the weights (scalar).
        mean_square: of their squares (scalar).

    Returns:
        Scalar: 1 where all weights are equal, 1 / n where one of n is not 0, 0 where all are 0.
    """
    return divide(mean.square(), mean_square)
