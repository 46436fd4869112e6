"""Figures that tell how far the rollout engine is from the trainer, over a whole batch.

They have maxima, deviations and quotients, so they are computed where the whole batch is. What can
be added over micro-batches is in objective.py. A batch without a token of mask 1 has no metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from configs.algorithm.corrections import CorrectionStep, RejectCorrection, WeightCorrection
from engines.algorithms.jagged import divide
from engines.algorithms.metric_sums import MetricSums, mean_over
from engines.algorithms.rollout_correction import (
    CORRECTIONS,
    Mismatch,
    Step,
    band,
    correct,
    divergence,
    mean_weight,
    raw_weights,
    truncate,
)
from engines.imports import imported


def mismatch_metrics(mismatch: Mismatch) -> dict[str, float]:
    """The gap of the two policies. Means over rows count an empty row as 0.

    kl and k3_kl: KL(rollout, train) by k1 and k3 over tokens; *_ppl: mean over rows of
    exp(-mean log-prob), *_log_ppl of -mean log-prob; log_ppl_diff: training minus rollout;
    chi2_token = mean rho^2 - 1, chi2_seq likewise with the rows' products.
    """
    rows, mask = mismatch.rows, mismatch.mask
    if not bool(mask.any()):
        return {}
    exact, log_ratio = mismatch.log_ratio(bound=None), mismatch.log_ratio()
    train = rows.masked_mean(mismatch.logprobs.detach(), mask)
    rollout = train - rows.masked_mean(exact, mask)
    gap = rollout - train
    row_ratio = rows.sum(exact).clamp(-20.0, 20.0)
    result = {
        "training_ppl": (-train).exp().mean(),
        "training_log_ppl": (-train).mean(),
        "rollout_ppl": (-rollout).exp().mean(),
        "rollout_log_ppl": (-rollout).mean(),
        "kl": _over_tokens(-exact, mask),
        "k3_kl": _over_tokens(exact.exp() - exact - 1, mask),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": gap.exp().mean(),
        "chi2_token": _over_tokens((2 * log_ratio).exp(), mask) - 1,
        "chi2_seq": (2 * row_ratio).exp().mean() - 1,
    }
    return {name: float(value) for name, value in result.items()}


def weight_metrics(
    mismatch: Mismatch, weights: Tensor, level: str, lower: float | None, upper: float
) -> dict[str, float]:
    """Figures of the weights [T] of `truncate` or `band` before normalisation.

    weight_eff_sample_size = (mean w)^2 / mean w^2 over tokens, 1 at best. The shares high and low
    are of the raw ratio against the bounds (no lower: 1 / upper). weight_seq_*: of the rows' means.
    """
    rows, mask = mismatch.rows, mismatch.mask
    if not bool(mask.any()):
        return {}
    raw = raw_weights(mismatch, level).where(mask, 0.0)
    low = 1.0 / upper if lower is None else lower
    if level == "sequence":
        per_row = rows.sum(mismatch.log_ratio(bound=None))
        result = {
            "weight_max": per_row.max().clamp(max=20.0).exp(),
            "weight_min": per_row.min().exp(),
            "weight_ratio_fraction_high": (per_row.exp() > upper).float().mean(),
            "weight_ratio_fraction_low": (per_row.exp() < low).float().mean(),
        }
    else:
        result = {
            "weight_max": weights[mask].max(),
            "weight_min": weights[mask].min(),
            "weight_ratio_fraction_high": _over_tokens((raw > upper).float(), mask),
            "weight_ratio_fraction_low": _over_tokens((raw < low).float(), mask),
        }
    bounded = weights.clamp(0.0, upper)
    mean, square = _over_tokens(bounded, mask), _over_tokens(bounded.square(), mask)
    row_means, raw_means = rows.masked_mean(weights, mask), rows.masked_mean(raw, mask)
    result |= {
        "weight_mean": _over_tokens(weights, mask),
        "weight_std": (square - mean.square()).clamp(min=0).sqrt(),
        "weight_eff_sample_size": divide(mean.square(), square),
        "weight_seq_mean": row_means.mean(),
        "weight_seq_std": _deviation(row_means),
        "weight_seq_max": row_means.max(),
        "weight_seq_min": row_means.min(),
        "weight_seq_max_deviation": (row_means - 1).abs().max(),
        "weight_seq_fraction_high": (raw_means > upper).float().mean(),
        "weight_seq_fraction_low": (raw_means < low).float().mean(),
        "weight_oob_ratio": _over_tokens(((raw < low) | (raw > upper)).float(), mask),
        "weight_batch_norm_factor": mean_weight(mismatch, weights, level),
    }
    return {name: float(value) for name, value in result.items()}


def rejection_metrics(
    mismatch: Mismatch, kept: Tensor, statistic: str, low: float | None, high: float
) -> dict[str, float]:
    """Figures of one `reject` by its statistic; low and high on the statistic's own scale.

    Shares over tokens, or over non-empty rows for a row's statistic; reject_seq_*: over rows, of
    the row's statistic or its token mean.
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
    mean, square = _over_tokens(bounded, mask), _over_tokens(bounded.square(), mask)
    row_hit = (rows.masked_sum((~kept).to(value.dtype), mask) > 0)[filled]
    result = {
        "mean": _over_tokens(value, mask),
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
        "masked_fraction": _over_tokens((~kept).float(), mask),
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
        "reject_masked_fraction": float(_over_tokens(lost.float(), mismatch.mask)),
        "reject_seq_masked_fraction": float(hit.float().mean()),
    }


def _over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    kept = values.where(mask, 0.0)
    return divide(kept.sum(), mask.sum().to(kept.dtype))


def _deviation(values: Tensor) -> Tensor:
    return values.std() if values.numel() > 1 else values.new_zeros(())


def correction_metrics(mismatch: Mismatch, steps: Sequence[CorrectionStep]) -> dict[str, float]:
    """The gap of the two policies, and of each step its own metrics: weights, rejections, shares.

    Of two steps of one kind the later one's metrics stand.
    """
    metrics = mismatch_metrics(mismatch)
    if not metrics or not steps:
        return metrics
    functions = []
    for step in steps:
        function = imported(step.path) if step.kind == "function" else CORRECTIONS[step.kind]
        functions.append((function, step.arguments()))
        if isinstance(step, WeightCorrection):
            bounds = (step.lower, math.inf if step.upper is None else step.upper)
            plain = function(mismatch, **{**step.arguments(), "normalize": False})
            metrics |= weight_metrics(mismatch, plain, step.level, *bounds)
        elif isinstance(step, RejectCorrection):
            kept = function(mismatch, **step.arguments())
            low, high = _scale(step)
            metrics |= rejection_metrics(mismatch, kept, step.statistic, low, high)
    _, kept = correct(mismatch, functions)
    return metrics | kept_metrics(mismatch, kept)


def _scale(step: RejectCorrection) -> tuple[float | None, float]:
    """The bounds of a rejection on its statistic's own scale."""
    if not step.statistic.endswith("k1"):
        return None, step.upper
    low = -math.log(step.upper) if step.lower is None else math.log(step.lower)
    return low, math.log(step.upper)


def gap_sums(mismatch: Mismatch) -> MetricSums:
    """The gap of the two policies, as means over tokens with mask 1, or over rows with such tokens.

    kl_rollout_k1 and _k3: KL(rollout, train) over tokens; log_ppl_gap: over rows, the training
    policy's log perplexity less the rollout policy's; ppl_ratio: over rows, exp of that.
    """
    log_ratio = mismatch.log_ratio()
    gap = -mismatch.rows.masked_mean(log_ratio, mismatch.mask)
    filled = mismatch.rows.tokens(mismatch.mask) > 0
    return MetricSums(
        means={
            "kl_rollout_k1": mean_over(-log_ratio, mismatch.mask),
            "kl_rollout_k3": mean_over(log_ratio.exp() - 1 - log_ratio, mismatch.mask),
            "log_ppl_gap": mean_over(gap, filled),
            "ppl_ratio": mean_over(gap.exp(), filled),
        }
    )


def correction_sums(
    mismatch: Mismatch, weights: Tensor, kept: Tensor | None, steps: Sequence[Step]
) -> MetricSums:
    """What the corrections did, as means over tokens with mask 1.

    correction_weight: the weight; correction_left_out: share without a part in the loss;
    correction_clipped_high, _low: shares whose ratio is beyond a bound of a weight of `steps`;
    correction_factor (weight, 0 where left out) and its square give `effective_sample_size`.
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


def effective_sample_size(metrics: Mapping[str, float]) -> dict[str, float]:
    """(mean f)^2 / mean f^2 of the correction's factor f over tokens, 1 at best; {} without one."""
    mean, square = (metrics.get(f"correction_factor{end}") for end in ("", "_squared"))
    if mean is None or square is None:
        return {}
    size = divide(torch.tensor(mean * mean), torch.tensor(square))
    return {"correction_effective_sample_size": float(size)}
