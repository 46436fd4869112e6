"""How far the rollout engine is from the trainer, and what the corrections did about it.

Here over a whole batch, before the update: maxima, deviations and quotients too, verl's
rollout_corr/*. They are made of numbers by row (`correction_rows`), of which each depends on its row
alone: a batch that was cut between rows has the same metrics, to the bit. Those of micro-batches, in
the loss, are in rollout_correction_sums.py. rho = pi / pi_rollout. A batch without a token of mask 1
has no metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engines.algorithms.aggregation import MetricSums
from engines.algorithms.inputs import LOG_RATIO_BOUND
from engines.algorithms.kl import k1, k3
from engines.algorithms.rollout_correction import (
    Mismatch,
    Step,
    band,
    bounds_of,
    correct,
    divergence,
    divided,
    mean_weight,
    raw_weights,
    reject,
    truncate,
)
from engines.algorithms.rollout_correction_sums import effective_sample_size

ByRow = Mapping[str, Tensor]  # name -> [N]


def correction_metrics(mismatch: Mismatch, steps: Sequence[Step]) -> dict[str, float]:
    """The gap of the two policies, and of each step its own metrics: weights, rejections, shares.

    Args:
        mismatch: of the whole batch.
        steps: as for `correct`; of two steps of one kind the later one's metrics stand.
    """
    metrics = metrics_of_rows(correction_rows(mismatch, steps), steps)
    if not metrics or not steps:
        return metrics
    return metrics | kept_sums(mismatch, correct(mismatch, steps)[1]).values()


def correction_rows(mismatch: Mismatch, steps: Sequence[Step]) -> dict[str, Tensor]:
    """What each row adds to `metrics_of_rows` and to the mean weights of `with_mean_weights` [N].

    A step's numbers are named <its place>/<name>; they do not depend on the advantages.
    """
    found = _gap_rows(mismatch)
    for place, (function, params) in enumerate(steps):
        own: Mapping[str, Tensor] = {}
        if function in (truncate, band):
            plain = function(mismatch, **{**params, "normalize": False})
            own = _weight_rows(mismatch, plain, str(params["level"]), *_bounds(params))
        elif function is reject:
            own = _rejection_rows(mismatch, params)
        found |= {f"{place}/{name}": values for name, values in own.items()}
    return found


def metrics_of_rows(found: ByRow, steps: Sequence[Step]) -> dict[str, float]:
    """`correction_metrics` but for the shares of `kept_sums`, of the numbers of all rows.

    found: of `correction_rows`, those of the parts one after the other in the order of the rows.
    """
    if not bool((found["tokens"] > 0).any()):
        return {}
    metrics = _gap_metrics(found)
    for place, (function, params) in enumerate(steps):
        if function in (truncate, band):
            level, (low, upper) = str(params["level"]), _bounds(params)
            metrics |= _weight_metrics(_of_step(found, place), level, low, upper)
        elif function is reject:
            metrics |= _rejection_metrics(_of_step(found, place), params)
    return {name: float(value) for name, value in metrics.items()}


def with_mean_weights(steps: Sequence[Step], found: ByRow) -> tuple[Step, ...]:
    """The steps for a part of a batch: those that normalise divide by the mean of the whole batch.

    found: of `correction_rows`, of all rows; read are only the columns of `mean_weight_columns`.
    """

    def for_a_part(place: int, step: Step) -> Step:
        function, params = step
        if not params.get("normalize"):
            return step
        mean = mean_weight(found[f"{place}/sum"], found["tokens"], str(params["level"]))

        def weights(mismatch: Mismatch, **params: Any) -> Tensor:
            return divided(function(mismatch, **{**params, "normalize": False}), mean)

        return weights, params

    return tuple(for_a_part(place, step) for place, step in enumerate(steps))


def mean_weight_columns(steps: Sequence[Step]) -> list[str]:
    """Which of `correction_rows` the mean weights are made of; [] where no step normalises."""
    sums = [f"{place}/sum" for place, (_, params) in enumerate(steps) if params.get("normalize")]
    return ["tokens", *sums] if sums else []


def kept_sums(mismatch: Mismatch, kept: Tensor) -> MetricSums:
    """What all verdicts left out; kept: bool [T], of `correct`.

    Means: reject_masked_fraction, over the tokens with mask 1, and reject_seq_masked_fraction, of
    the rows that lost a token, over all rows, empty ones too. They are counts, so parts add up to
    the whole exactly.
    """
    lost = mismatch.by_row((~kept).double())
    tokens = mismatch.tokens().sum()
    return MetricSums(
        means={
            "reject_masked_fraction": torch.stack([lost.sum(), tokens]),
            "reject_seq_masked_fraction": torch.stack(
                [(lost > 0).double().sum(), torch.full_like(tokens, len(lost))]
            ),
        }
    )


def _of_step(found: ByRow, place: int) -> dict[str, Tensor]:
    prefix = f"{place}/"
    own = {name.removeprefix(prefix): v for name, v in found.items() if name.startswith(prefix)}
    return {"tokens": found["tokens"], "log_ratio": found["log_ratio"], **own}


def _bounds(params: Mapping[str, Any]) -> tuple[float, float]:
    """Of a step's weights: low, 1 / upper where there is none, and upper, inf where there is none."""
    upper = math.inf if params["upper"] is None else params["upper"]
    return 1.0 / upper if params["lower"] is None else params["lower"], upper


def _gap_rows(mismatch: Mismatch) -> dict[str, Tensor]:
    rows, mask = mismatch.rows, mismatch.mask
    exact, log_ratio = mismatch.log_ratio(bound=None), mismatch.log_ratio()
    return {
        "tokens": mismatch.tokens(),
        "log_ratio": rows.sum(exact),
        "log_prob_mean": rows.masked_mean(mismatch.logprobs.detach(), mask),
        "log_ratio_mean": rows.masked_mean(exact, mask),
        "k1": mismatch.by_row(k1(exact)),
        "k3": mismatch.by_row(k3(exact)),
        "ratio_squared": mismatch.by_row((2 * log_ratio).exp()),
    }


def _gap_metrics(found: ByRow) -> dict[str, Tensor]:
    """The gap of the two policies over a whole batch, log rho as it is but where said.

    kl and k3_kl: KL(rollout, train) by k1 and k3, in nats, mean over the tokens with mask 1. Mean
    over all rows, an empty one counted with log-prob 0: *_ppl of exp(-mean log-prob), *_log_ppl of
    -mean log-prob; log_ppl_diff: training minus rollout, *_abs_diff its absolute value, *_max and
    *_min its extremes; ppl_ratio: of exp(log_ppl_diff). chi2_token = mean rho^2 - 1 over the tokens,
    chi2_seq likewise over all rows with their products; log rho there within 20 nats.
    """
    train = found["log_prob_mean"]
    rollout = train - found["log_ratio_mean"]
    gap = rollout - train
    row_ratio = found["log_ratio"].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return {
        "training_ppl": (-train).exp().mean(),
        "training_log_ppl": (-train).mean(),
        "rollout_ppl": (-rollout).exp().mean(),
        "rollout_log_ppl": (-rollout).mean(),
        "kl": _token_mean(found, "k1"),
        "k3_kl": _token_mean(found, "k3"),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": gap.exp().mean(),
        "chi2_token": _token_mean(found, "ratio_squared") - 1,
        "chi2_seq": (2 * row_ratio).exp().mean() - 1,
    }


def _weight_rows(
    mismatch: Mismatch, weights: Tensor, level: str, low: float, upper: float
) -> dict[str, Tensor]:
    """weights: [T], before normalisation."""
    rows, mask = mismatch.rows, mismatch.mask
    raw = raw_weights(mismatch, level)
    bounded = weights.clamp(0.0, upper)
    return {
        "sum": mismatch.by_row(weights),
        "bounded": mismatch.by_row(bounded),
        "bounded_squared": mismatch.by_row(bounded.square()),
        "raw": mismatch.by_row(raw),
        "max": rows.masked_max(weights, mask, empty=-math.inf),
        "min": rows.masked_min(weights, mask, empty=math.inf),
        "high": mismatch.by_row(raw > upper),
        "low": mismatch.by_row(raw < low),
        "outside": mismatch.by_row((raw < low) | (raw > upper)),
    }


def _weight_metrics(found: ByRow, level: str, low: float, upper: float) -> dict[str, Tensor]:
    """What `truncate` or `band` did over a whole batch.

    Args:
        found: of `_weight_rows`, with the rows' tokens and log ratios.
        level: "token" or "sequence", as the weights were made.
        low: bound of the weights.
        upper: bound of the weights; may be inf.

    Returns:
        Means over the tokens with mask 1, and of the rows' means over all N rows (weight_seq_*).
        weight_eff_sample_size: of the weights, 1 at best. The shares high and low are of the raw
        ratio against the bounds: of tokens, or of all N rows for level "sequence".
    """
    if level == "sequence":
        per_row = found["log_ratio"]
        result = {
            "weight_max": per_row.max().clamp(max=LOG_RATIO_BOUND).exp(),
            "weight_min": per_row.min().exp(),
            "weight_ratio_fraction_high": (per_row.exp() > upper).double().mean(),
            "weight_ratio_fraction_low": (per_row.exp() < low).double().mean(),
        }
    else:
        result = {
            "weight_max": found["max"].max(),
            "weight_min": found["min"].min(),
            "weight_ratio_fraction_high": _token_mean(found, "high"),
            "weight_ratio_fraction_low": _token_mean(found, "low"),
        }
    mean, square = _token_mean(found, "bounded"), _token_mean(found, "bounded_squared")
    row_means, raw_means = _row_means(found, "sum"), _row_means(found, "raw")
    return result | {
        "weight_mean": _token_mean(found, "sum"),
        "weight_std": (square - mean.square()).clamp(min=0).sqrt(),
        "weight_eff_sample_size": effective_sample_size(mean, square),
        "weight_seq_mean": row_means.mean(),
        "weight_seq_std": _deviation(row_means),
        "weight_seq_max": row_means.max(),
        "weight_seq_min": row_means.min(),
        "weight_seq_max_deviation": (row_means - 1).abs().max(),
        "weight_seq_fraction_high": (raw_means > upper).double().mean(),
        "weight_seq_fraction_low": (raw_means < low).double().mean(),
        "weight_oob_ratio": _token_mean(found, "outside"),
        "weight_batch_norm_factor": mean_weight(found["sum"], found["tokens"], level),
    }


def _rejection_rows(mismatch: Mismatch, params: Mapping[str, Any]) -> dict[str, Tensor]:
    """params: of `reject`."""
    rows, mask = mismatch.rows, mismatch.mask
    low, high = bounds_of(params["statistic"], params["lower"], params["upper"])
    floor = 0.0 if low is None else low
    value = divergence(mismatch, params["statistic"])
    bounded = value.clamp(floor, high)
    return {
        "sum": mismatch.by_row(value),
        "bounded": mismatch.by_row(bounded),
        "bounded_squared": mismatch.by_row(bounded.square()),
        "max": rows.masked_max(value, mask, empty=-math.inf),
        "min": rows.masked_min(value, mask, empty=math.inf),
        "high": mismatch.by_row(value > high),
        "low": mismatch.by_row(value < floor),
        "lost": mismatch.by_row(~reject(mismatch, **params)),
        "mean": rows.masked_mean(value, mask),
    }


def _rejection_metrics(found: ByRow, params: Mapping[str, Any]) -> dict[str, Tensor]:
    """What one `reject` did over a whole batch.

    Args:
        found: of `_rejection_rows`, with the rows' tokens.
        params: of the `reject`.

    Returns:
        reject_<statistic>_*: mean, std and masked_fraction over the tokens with mask 1; extremes and
        fractions over these tokens, or over the rows that have any for a row's statistic; seq_* over
        such rows, of the row's statistic or of its token mean.
    """
    statistic = params["statistic"]
    low, high = bounds_of(statistic, params["lower"], params["upper"])
    floor = 0.0 if low is None else low
    filled = found["tokens"] > 0
    per_row = found["mean"][filled]
    mean, square = _token_mean(found, "bounded"), _token_mean(found, "bounded_squared")
    if statistic.startswith("seq"):
        above, below = (per_row > high).double().mean(), (per_row < floor).double().mean()
        extremes = per_row, per_row
    else:
        above, below = _token_mean(found, "high"), _token_mean(found, "low")
        extremes = found["max"], found["min"]
    result = {
        "mean": _token_mean(found, "sum"),
        "max": extremes[0].max(),
        "min": extremes[1].min(),
        "fraction_high": above,
        "fraction_low": below * (low is not None),
        "std": (square - mean.square()).clamp(min=0).sqrt(),
        "seq_mean": per_row.mean(),
        "seq_std": _deviation(per_row),
        "seq_max": per_row.max(),
        "seq_min": per_row.min(),
        "seq_max_deviation": per_row.abs().max(),
        "seq_fraction_high": (per_row > high).double().mean(),
        "masked_fraction": _token_mean(found, "lost"),
        "seq_masked_fraction": (found["lost"] > 0)[filled].double().mean(),
    }
    if low is not None:
        result["seq_fraction_low"] = (per_row < low).double().mean()
    return {f"reject_{statistic}_{name}": number for name, number in result.items()}


def _token_mean(found: ByRow, name: str) -> Tensor:
    """The mean over the tokens with mask 1 of what was summed by row."""
    return found[name].sum() / found["tokens"].sum().clamp(min=1)


def _row_means(found: ByRow, name: str) -> Tensor:
    """[N], the mean over each row's tokens with mask 1; 0 for a row without any."""
    return found[name] / found["tokens"].clamp(min=1)


def _deviation(values: Tensor) -> Tensor:
    return values.std() if values.numel() > 1 else values.new_zeros(())
