"""Corrections for samples that another policy than the trained one has written.

The behaviour policy is the rollout engine's: other kernels, another number format, older weights.
A correction maps the two policies' log-probs to a factor for every token: a weight (float) or a
verdict (bool, False = leave the token out). `correct` combines several. All are detached. A new one
is one function and one line in CORRECTIONS, or a user's import path. What they did is told by
rollout_correction_metrics.py.

rho = pi / pi_rollout, pi the policy before the update (or the current one, see objective.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.algorithms.inputs import LOG_RATIO_BOUND
from engines.algorithms.jagged import Rows, divide
from engines.algorithms.kl import DIVERGENCES, binary_kl, inside_trust_region

PROBABILITY_BOUND = 1e-6  # of a token from 0 and from 1, in the binary KL of a rejection (verl)


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
            of it see rollout_correction_metrics.with_mean_weights.

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
    kept = mismatch.mask
    for function, params in steps:
        factor = function(mismatch, **params)
        if factor.dtype == torch.bool:
            kept = kept & factor
        else:
            weights = weights * torch.where(mismatch.mask, factor, 0.0)
    return weights, kept
