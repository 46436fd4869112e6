"""The gap of rollout engine and trainer, and what the corrections did, in micro-batches of the loss.

Means only, which add up over micro-batches and ranks; those of a whole batch before the update are in
rollout_correction_metrics.py. rho = pi / pi_rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engines.algorithms.aggregation import MetricSums, mean_over
from engines.algorithms.jagged import divide
from engines.algorithms.kl import k1, k3
from engines.algorithms.rollout_correction import Mismatch, Step, band, raw_weights, truncate


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
