"""How far the rollout engine is from the trainer: figures that add up over micro-batches and ranks.

What needs the whole batch (extremes, deviations) is in correction_metrics.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engines.corrections import Mismatch, Step, band, raw_weights, truncate
from engines.jagged import divide
from engines.metric_sums import MetricSums, mean_over


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


def effective_sample_size(figures: Mapping[str, float]) -> dict[str, float]:
    """(mean f)^2 / mean f^2 of the correction's factor f over tokens, 1 at best; {} without one."""
    mean, square = (figures.get(f"correction_factor{end}") for end in ("", "_squared"))
    if mean is None or square is None:
        return {}
    size = divide(torch.tensor(mean * mean), torch.tensor(square))
    return {"correction_effective_sample_size": float(size)}
