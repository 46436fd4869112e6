"""Corrections for samples that another policy than the trained one has written, and their metrics.

The behaviour policy is the rollout engine's: other kernels, another number format, older weights.
A correction maps the two policies' log-probs to a factor for every token: a weight (float) or a
verdict (bool, False = leave the token out). `correct` combines several. All are detached. A new one
is one function and one line in CORRECTIONS, or a user's import path.

`gap_sums` and `correction_sums` tell the gap and what was done about it in micro-batches of the
loss: means only, which add up over micro-batches and ranks. `correction_metrics` does over a whole
batch before the update: maxima, deviations and quotients too, verl's rollout_corr/*. They are made
of numbers by row (`correction_rows`), of which each depends on its row alone: a batch that was cut
between rows has the same metrics, to the bit. A batch without a token of mask 1 has none.

rho = pi / pi_rollout, pi the policy before the update (or the current one, see objective.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.algorithms.aggregation import MetricSums, Rows, divide, mean_over
from engines.algorithms.inputs import LOG_RATIO_BOUND
from engines.algorithms.kl import DIVERGENCES, binary_kl, inside_trust_region, k1, k3

PROBABILITY_BOUND = 1e-6  # of a token from 0 and from 1, in the binary KL of a rejection (verl)
ByRow = Mapping[str, Tensor]  # name -> [N]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """The same tokens under two policies; what stands under mask 0 is never used.

    Two rows, "ab" and "c", of which the trainer finds "b" half as probable as the rollout engine
    said, and "c" came without a log-prob:

        Mismatch(
            rows=Rows.of_lengths(tensor([2, 1])),
            mask=tensor([True, True, True]),
            logprobs=tensor([-0.1, -1.7, -0.5]),
            rollout_logprobs=tensor([-0.1, -1.0, nan]),
        ).log_ratio()  # tensor([0.0, -0.7, 0.0])
    """

    rows: Rows  # N rows, T tokens
    mask: Tensor  # bool [T]
    logprobs: Tensor  # [T] of the policy that trains, nats
    rollout_logprobs: Tensor  # [T] of the policy that wrote; NaN: not known, counts as equal
    advantages: Tensor | None = None  # [T], for corrections that look at its sign

    def log_ratio(self, bound: float | None = LOG_RATIO_BOUND) -> Tensor:
        """log rho [T] in nats, detached; 0 where masked or not known, within the bound if given."""
        ratio = torch.where(self.mask, self.logprobs.detach() - self.rollout_logprobs.detach(), 0.0)
        ratio = torch.where(ratio.isnan(), 0.0, ratio)
        return ratio if bound is None else ratio.clamp(-bound, bound)

    def by_row(self, values: Tensor) -> Tensor:
        """Sum of values [T] over each row's tokens with mask 1, float64 [N]."""
        return self.rows.masked_sum(values.double(), self.mask)

    def tokens(self) -> Tensor:
        """Tokens with mask 1 of each row, float64 [N]."""
        return self.rows.tokens(self.mask, torch.float64)


def truncate(
    mismatch: Mismatch, *, level: str, lower: float | None, upper: float | None, normalize: bool
) -> Tensor:
    """Truncated importance sampling: w = clip(rho, lower, upper).

    TIS: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl.

    Args:
        mismatch: the two policies' log-probs [T].
        level: "token", rho of the token; "sequence", the product over the row.
        lower: smallest weight; None: unbounded.
        upper: largest weight; None: unbounded.
        normalize: divide by the weights' mean over the tokens ("token"), or by the mean over the
            non-empty rows ("sequence"), of the batch given, which must then be the whole. For parts
            of it see with_mean_weights.

    Returns:
        Weights [T], 0 where masked.
    """
    # A weight is never below 0, and clamp wants a bound.
    weights = raw_weights(mismatch, level).clamp(min=0.0 if lower is None else lower, max=upper)
    return _finished(mismatch, weights, level, normalize)


def band(
    mismatch: Mismatch, *, level: str, lower: float | None, upper: float | None, normalize: bool
) -> Tensor:
    """IcePop: w = rho where lower <= rho <= upper, else 0. arXiv:2510.18855.

    Args and result as in `truncate`.
    """
    weights = raw_weights(mismatch, level)
    if lower is not None:
        weights = torch.where(weights >= lower, weights, 0.0)
    if upper is not None:
        weights = torch.where(weights <= upper, weights, 0.0)
    return _finished(mismatch, weights, level, normalize)


def raw_weights(mismatch: Mismatch, level: str) -> Tensor:
    """rho of each token ("token"), or the product over its row ("sequence"): [T].

    log rho, or its sum over the row, is kept within 20 nats.
    """
    if level == "token":
        return mismatch.log_ratio().exp()
    total = mismatch.rows.sum(mismatch.log_ratio(bound=None))
    return mismatch.rows.spread(total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp())


def _finished(mismatch: Mismatch, weights: Tensor, level: str, normalize: bool) -> Tensor:
    weights = torch.where(mismatch.mask, weights, 0.0)
    if not normalize:
        return weights
    return divided(weights, mean_weight(mismatch.by_row(weights), mismatch.tokens(), level))


def divided(weights: Tensor, mean: Tensor) -> Tensor:
    """Weights [T] by their mean (scalar); as they are where that is 0."""
    mean = mean.to(weights.dtype)
    return torch.where(mean > 1e-8, weights / mean.clamp(min=1e-8), weights)


def mean_weight(sums: Tensor, tokens: Tensor, level: str) -> Tensor:
    """The mean weight of a batch (float64 scalar), 0 for one without a token of mask 1.

    Over the tokens with mask 1 ("token"), or of the rows' means over the rows that have such tokens
    ("sequence"). It is made of numbers by row, so a batch in parts has the same mean to the bit.

    Args:
        sums: [N], the weights of each row's tokens added up.
        tokens: [N], tokens with mask 1.
        level: "token" or "sequence".
    """
    if level == "token":
        return sums.sum() / tokens.sum().clamp(min=1)
    means = sums / tokens.clamp(min=1)
    return divide(means.sum(), (tokens > 0).sum().double())


def reject(mismatch: Mismatch, *, statistic: str, lower: float | None, upper: float) -> Tensor:
    """Rejection: tokens or rows whose divergence is out of bounds are left out.

    "Rollout correction" of verl.

    Args:
        mismatch: the two policies' log-probs [T].
        statistic: see `divergence`.
        lower: of k1 only, smallest pi_rollout / pi; None: 1 / upper.
        upper: of k1 largest pi_rollout / pi (k1 is kept where log lower <= k1 <= log upper); of the
            others largest divergence in nats.

    Returns:
        bool [T], False where left out; a row's verdict stands at each of its tokens.
    """
    value = divergence(mismatch, statistic)
    low, high = bounds_of(statistic, lower, upper)
    return value <= high if low is None else (value >= low) & (value <= high)


def bounds_of(statistic: str, lower: float | None, upper: float) -> tuple[float | None, float]:
    """The bounds of `reject` on the statistic's own scale, in nats; None: no lower one."""
    if not statistic.endswith("k1"):
        return None, upper
    return -math.log(upper) if lower is None else math.log(lower), math.log(upper)


def divergence(mismatch: Mismatch, statistic: str) -> Tensor:
    """How far the policies are from each other at each token [T], in nats, log rho within 20 nats.

    Args:
        mismatch: the two policies' log-probs [T].
        statistic: <over>_<estimator>. Estimators of KL(pi_rollout, pi): k1, k2, k3 (kl.py), and
            binary_kl, the larger of the two directions. Over: token (each by itself); seq_sum,
            seq_mean (over the row's tokens with mask 1; with k1 log of the geometric mean), seq_max
            (the worst token), which stand at each token of the row.
    """
    over, _, estimator = statistic.rpartition("_")
    if statistic == "token_binary_kl":
        return _binary_kl(mismatch)
    value = DIVERGENCES[estimator](mismatch.log_ratio())
    if over == "token":
        return value
    rows, mask = mismatch.rows, mismatch.mask
    if over == "seq_max":
        return rows.spread(rows.masked_max(value, mask, empty=0.0))
    return rows.spread(
        rows.masked_sum(value, mask) if over == "seq_sum" else rows.masked_mean(value, mask)
    )


def _binary_kl(mismatch: Mismatch) -> Tensor:
    log_new = torch.where(mismatch.mask, mismatch.logprobs.detach(), -1.0)
    log_old = log_new - mismatch.log_ratio()
    new, old = (
        log.exp().clamp(PROBABILITY_BOUND, 1 - PROBABILITY_BOUND) for log in (log_new, log_old)
    )
    forward = binary_kl(new, old, (new / old).log())
    return torch.maximum(forward, binary_kl(old, new, (old / new).log()))


def veto(mismatch: Mismatch, *, floor: float) -> Tensor:
    """Leave out a row if any of its tokens has rho < floor: text that pi would not have written.

    Args:
        mismatch: the two policies' log-probs [T].
        floor: smallest rho, in (0, 1).

    Returns:
        bool [T], False where left out.
    """
    smallest = mismatch.rows.masked_min(mismatch.log_ratio(bound=None), mismatch.mask, empty=0.0)
    return mismatch.rows.spread(smallest >= math.log(floor))


def dppo(mismatch: Mismatch, *, measure: str, low: float, high: float) -> Tensor:
    """The DPPO mask: leave out a token that moved away from the rollout policy too far already.

    arXiv:2602.04879. The region is around pi_rollout; see kl.inside_trust_region.

    Args:
        mismatch: the two policies' log-probs [T] and the advantages.
        measure: "tv" (total variation) or "kl" (binary KL).
        low: bound where A <= 0, a probability or nats.
        high: bound where A > 0.

    Returns:
        bool [T], False where left out.
    """
    assert mismatch.advantages is not None, "the DPPO mask looks at advantages"
    log_new = torch.where(mismatch.mask, mismatch.logprobs.detach(), 0.0)
    return inside_trust_region(
        log_new,
        log_new - mismatch.log_ratio(bound=None),
        torch.where(mismatch.mask, mismatch.advantages, 0.0),
        measure=measure,
        low=low,
        high=high,
    )


def off_policy_sequence(mismatch: Mismatch, *, threshold: float) -> Tensor:
    """Leave out what is both bad and stale: A < 0 and the row's mean of -log rho above threshold.

    DeepSeek-V3.2, arXiv:2512.02556; TRL's off_policy_mask_threshold.

    Args:
        mismatch: the two policies' log-probs [T] and the advantages.
        threshold: nats; the mean is over the row's tokens with mask 1.

    Returns:
        bool [T], False where left out.
    """
    assert mismatch.advantages is not None, "the off-policy sequence mask looks at advantages"
    drift = mismatch.rows.masked_mean(-mismatch.log_ratio(bound=None), mismatch.mask)
    return (mismatch.advantages >= 0) | (mismatch.rows.spread(drift) <= threshold)


CORRECTIONS: Mapping[str, Callable[..., Tensor]] = {
    "truncate": truncate,
    "band": band,
    "reject": reject,
    "veto": veto,
    "dppo": dppo,
    "off_policy_sequence": off_policy_sequence,
}

Step = tuple[Callable[..., Tensor], Mapping[str, object]]  # a correction and its parameters


def correct(mismatch: Mismatch, steps: Sequence[Step]) -> tuple[Tensor, Tensor]:
    """All corrections together.

    Args:
        mismatch: the two policies' log-probs [T].
        steps: the corrections with their parameters, in order.

    Returns:
        weights [T], the product of the weights, 0 where masked; kept bool [T], mask and verdicts.
    """
    weights = mismatch.mask.to(mismatch.logprobs.dtype)
    mask = mismatch.mask
    for function, params in steps:
        factor = function(mismatch, **params)
        if factor.dtype == torch.bool:
            mask = mask & factor
        else:
            weights = weights * torch.where(mismatch.mask, factor, 0.0)
    return weights, mask


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
    sizes = {}
    for name, weight in (("rollout", "rollout_ratio"), ("correction", "correction_factor")):
        mean, square = (metrics.get(f"{weight}{end}") for end in ("", "_squared"))
        if mean is None or square is None or (weight == "rollout_ratio" and not square):
            continue
        size = effective_sample_size(
            torch.tensor(mean, dtype=torch.float64), torch.tensor(square, dtype=torch.float64)
        )
        sizes[f"{name}_effective_sample_size"] = float(size)
    return sizes


def effective_sample_size(mean: Tensor, mean_square: Tensor) -> Tensor:
    """Share of the samples that weighted ones are worth: (mean w)^2 / mean w^2 (Kish 1965).

    Args:
        mean: of the weights (scalar).
        mean_square: of their squares (scalar).

    Returns:
        Scalar: 1 where all weights are equal, 1 / n where one of n is not 0, 0 where all are 0.
    """
    return divide(mean.square(), mean_square)


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
    by_row = _gap_rows(mismatch)
    for place, (function, params) in enumerate(steps):
        columns: Mapping[str, Tensor] = {}
        if function in (truncate, band):
            plain = function(mismatch, **{**params, "normalize": False})
            columns = _weight_rows(mismatch, plain, str(params["level"]), *_bounds(params))
        elif function is reject:
            columns = _rejection_rows(mismatch, params)
        by_row |= {f"{place}/{name}": values for name, values in columns.items()}
    return by_row


def metrics_of_rows(by_row: ByRow, steps: Sequence[Step]) -> dict[str, float]:
    """`correction_metrics` but for the shares of `kept_sums`, of the numbers of all rows.

    by_row: of `correction_rows`, those of the parts one after the other in the order of the rows.
    """
    if not bool((by_row["tokens"] > 0).any()):
        return {}
    metrics = _gap_metrics(by_row)
    for place, (function, params) in enumerate(steps):
        if function in (truncate, band):
            level, (low, upper) = str(params["level"]), _bounds(params)
            metrics |= _weight_metrics(_of_step(by_row, place), level, low, upper)
        elif function is reject:
            metrics |= _rejection_metrics(_of_step(by_row, place), params)
    return {name: float(value) for name, value in metrics.items()}


def with_mean_weights(steps: Sequence[Step], by_row: ByRow) -> tuple[Step, ...]:
    """The steps for a part of a batch: those that normalise divide by the mean of the whole batch.

    by_row: of `correction_rows`, of all rows; read are only the columns of `mean_weight_columns`.
    """

    def for_a_part(place: int, step: Step) -> Step:
        function, params = step
        if not params.get("normalize"):
            return step
        mean = mean_weight(by_row[f"{place}/sum"], by_row["tokens"], str(params["level"]))

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


def _of_step(by_row: ByRow, place: int) -> dict[str, Tensor]:
    prefix = f"{place}/"
    columns = {
        name.removeprefix(prefix): v for name, v in by_row.items() if name.startswith(prefix)
    }
    return {"tokens": by_row["tokens"], "log_ratio": by_row["log_ratio"], **columns}


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


def _gap_metrics(by_row: ByRow) -> dict[str, Tensor]:
    """The gap of the two policies over a whole batch, log rho as it is but where said.

    kl and k3_kl: KL(rollout, train) by k1 and k3, in nats, mean over the tokens with mask 1. Mean
    over all rows, an empty one counted with log-prob 0: *_ppl of exp(-mean log-prob), *_log_ppl of
    -mean log-prob; log_ppl_diff: training minus rollout, *_abs_diff its absolute value, *_max and
    *_min its extremes; ppl_ratio: of exp(log_ppl_diff). chi2_token = mean rho^2 - 1 over the tokens,
    chi2_seq likewise over all rows with their products; log rho there within 20 nats.
    """
    train = by_row["log_prob_mean"]
    rollout = train - by_row["log_ratio_mean"]
    gap = rollout - train
    row_ratio = by_row["log_ratio"].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return {
        "training_ppl": (-train).exp().mean(),
        "training_log_ppl": (-train).mean(),
        "rollout_ppl": (-rollout).exp().mean(),
        "rollout_log_ppl": (-rollout).mean(),
        "kl": _token_mean(by_row, "k1"),
        "k3_kl": _token_mean(by_row, "k3"),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": gap.exp().mean(),
        "chi2_token": _token_mean(by_row, "ratio_squared") - 1,
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


def _weight_metrics(by_row: ByRow, level: str, low: float, upper: float) -> dict[str, Tensor]:
    """What `truncate` or `band` did over a whole batch.

    Args:
        by_row: of `_weight_rows`, with the rows' tokens and log ratios.
        level: "token" or "sequence", as the weights were made.
        low: bound of the weights.
        upper: bound of the weights; may be inf.

    Returns:
        Means over the tokens with mask 1, and of the rows' means over all N rows (weight_seq_*).
        weight_eff_sample_size: of the weights, 1 at best. The shares high and low are of the raw
        ratio against the bounds: of tokens, or of all N rows for level "sequence".
    """
    if level == "sequence":
        per_row = by_row["log_ratio"]
        result = {
            "weight_max": per_row.max().clamp(max=LOG_RATIO_BOUND).exp(),
            "weight_min": per_row.min().exp(),
            "weight_ratio_fraction_high": (per_row.exp() > upper).double().mean(),
            "weight_ratio_fraction_low": (per_row.exp() < low).double().mean(),
        }
    else:
        result = {
            "weight_max": by_row["max"].max(),
            "weight_min": by_row["min"].min(),
            "weight_ratio_fraction_high": _token_mean(by_row, "high"),
            "weight_ratio_fraction_low": _token_mean(by_row, "low"),
        }
    mean, square = _token_mean(by_row, "bounded"), _token_mean(by_row, "bounded_squared")
    row_means, raw_means = _row_means(by_row, "sum"), _row_means(by_row, "raw")
    return result | {
        "weight_mean": _token_mean(by_row, "sum"),
        "weight_std": (square - mean.square()).clamp(min=0).sqrt(),
        "weight_eff_sample_size": effective_sample_size(mean, square),
        "weight_seq_mean": row_means.mean(),
        "weight_seq_std": _deviation(row_means),
        "weight_seq_max": row_means.max(),
        "weight_seq_min": row_means.min(),
        "weight_seq_max_deviation": (row_means - 1).abs().max(),
        "weight_seq_fraction_high": (raw_means > upper).double().mean(),
        "weight_seq_fraction_low": (raw_means < low).double().mean(),
        "weight_oob_ratio": _token_mean(by_row, "outside"),
        "weight_batch_norm_factor": mean_weight(by_row["sum"], by_row["tokens"], level),
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


def _rejection_metrics(by_row: ByRow, params: Mapping[str, Any]) -> dict[str, Tensor]:
    """What one `reject` did over a whole batch.

    Args:
        by_row: of `_rejection_rows`, with the rows' tokens.
        params: of the `reject`.

    Returns:
        reject_<statistic>_*: mean, std and masked_fraction over the tokens with mask 1; extremes and
        fractions over these tokens, or over the rows that have any for a row's statistic; seq_* over
        such rows, of the row's statistic or of its token mean.
    """
    statistic = params["statistic"]
    low, high = bounds_of(statistic, params["lower"], params["upper"])
    floor = 0.0 if low is None else low
    filled = by_row["tokens"] > 0
    per_row = by_row["mean"][filled]
    mean, square = _token_mean(by_row, "bounded"), _token_mean(by_row, "bounded_squared")
    if statistic.startswith("seq"):
        above, below = (per_row > high).double().mean(), (per_row < floor).double().mean()
        extremes = per_row, per_row
    else:
        above, below = _token_mean(by_row, "high"), _token_mean(by_row, "low")
        extremes = by_row["max"], by_row["min"]
    result = {
        "mean": _token_mean(by_row, "sum"),
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
        "masked_fraction": _token_mean(by_row, "lost"),
        "seq_masked_fraction": (by_row["lost"] > 0)[filled].double().mean(),
    }
    if low is not None:
        result["seq_fraction_low"] = (per_row < low).double().mean()
    return {f"reject_{statistic}_{name}": number for name, number in result.items()}


def _token_mean(by_row: ByRow, name: str) -> Tensor:
    """The mean over the tokens with mask 1 of what was summed by row."""
    return by_row[name].sum() / by_row["tokens"].sum().clamp(min=1)


def _row_means(by_row: ByRow, name: str) -> Tensor:
    """[N], the mean over each row's tokens with mask 1; 0 for a row without any."""
    return by_row[name] / by_row["tokens"].clamp(min=1)


def _deviation(values: Tensor) -> Tensor:
    return values.std() if values.numel() > 1 else values.new_zeros(())
