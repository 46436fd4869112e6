"""Corrections for samples that another policy than the trained one has written.

The behaviour policy is the rollout engine's: other kernels, another number format, older weights.
A correction maps the two policies' log-probs to a factor for every token: a weight (float) or a
verdict (bool, False = leave the token out). `correct` combines several. All are detached. A new one
is one function and one line in CORRECTIONS, or a user's import path.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """The same tokens under two policies; what stands under mask 0 is never used."""

    rows: Rows
    mask: Tensor  # bool [T]
    logprobs: Tensor  # [T] of the policy that trains, nats
    rollout_logprobs: Tensor  # [T] of the policy that wrote; NaN: not known, counts as equal
    advantages: Tensor | None = None  # [T], for corrections that look at its sign

    def log_ratio(self, bound: float | None = LOG_RATIO_BOUND) -> Tensor:
        """log rho [T], detached, 0 where masked or not known."""
        ratio = torch.where(self.mask, self.logprobs.detach() - self.rollout_logprobs.detach(), 0.0)
        ratio = torch.where(ratio.isnan(), 0.0, ratio)
        return ratio if bound is None else ratio.clamp(-bound, bound)


def truncate(
    mismatch: Mismatch, *, level: str, lower: float | None, upper: float | None, normalize: bool
) -> Tensor:
    """Truncated importance sampling: w = clip(rho, lower, upper).

    level "token": rho of the token; "sequence": the product over the row. TIS: Yao et al. 2025,
    https://fengyao.notion.site/off-policy-rl. normalize divides by the mean over the tokens, or
    over the rows, of the batch given, which must then be the whole.
    """
    weights = raw_weights(mismatch, level).clamp(min=lower, max=upper)
    return _finished(mismatch, weights, level, normalize)


def band(
    mismatch: Mismatch, *, level: str, lower: float | None, upper: float | None, normalize: bool
) -> Tensor:
    """IcePop: w = rho where lower <= rho <= upper, else 0. arXiv:2510.18855. As `truncate`."""
    weights = raw_weights(mismatch, level)
    if lower is not None:
        weights = torch.where(weights >= lower, weights, 0.0)
    if upper is not None:
        weights = torch.where(weights <= upper, weights, 0.0)
    return _finished(mismatch, weights, level, normalize)


def raw_weights(mismatch: Mismatch, level: str) -> Tensor:
    """rho of each token, or of its row [T]; log rho within 20 nats."""
    if level == "token":
        return mismatch.log_ratio().exp()
    total = mismatch.rows.sum(mismatch.log_ratio(bound=None))
    return mismatch.rows.spread(total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp())


def _finished(mismatch: Mismatch, weights: Tensor, level: str, normalize: bool) -> Tensor:
    weights = torch.where(mismatch.mask, weights, 0.0)
    if not normalize:
        return weights
    mean = mean_weight(mismatch, weights, level)
    return torch.where(mean > 1e-8, weights / mean.clamp(min=1e-8), weights)


def mean_weight(mismatch: Mismatch, weights: Tensor, level: str) -> Tensor:
    """Mean of weights [T] over tokens, or of the rows' means over non-empty rows (scalar)."""
    if level == "token":
        return divide(weights.sum(), mismatch.mask.sum().to(weights.dtype))
    filled = mismatch.rows.tokens(mismatch.mask) > 0
    per_row = mismatch.rows.masked_mean(weights, mismatch.mask)
    return divide(per_row.sum(), filled.sum().to(weights.dtype))


def reject(mismatch: Mismatch, *, statistic: str, lower: float | None, upper: float) -> Tensor:
    """Rejection: tokens or rows whose divergence is out of bounds are left out.

    statistic is <over>_<estimator>. The estimators of a token: k1 = -log rho, k2 = (log rho)^2 / 2,
    k3 = rho - 1 - log rho, binary_kl = the larger of KL_2(pi, pi_rollout) and KL_2(pi_rollout, pi)
    of "this token or another". Over: token (each by itself), seq_sum, seq_mean (with k1: the
    geometric mean), seq_max (the worst token); the seq_ ones keep or leave out a row.
    k1 is kept where log lower <= k1 <= log upper, so its bounds are of pi_rollout / pi; no lower
    means 1 / upper. The others are kept where <= upper. "Rollout correction" of verl.
    """
    value = divergence(mismatch, statistic)
    if statistic.endswith("k1"):
        low = -math.log(upper) if lower is None else math.log(lower)
        return (value >= low) & (value <= math.log(upper))
    return value <= upper


def divergence(mismatch: Mismatch, statistic: str) -> Tensor:
    """The statistic of `reject` at each token [T]; a row's is spread over its tokens."""
    over, _, estimator = statistic.rpartition("_")
    if statistic == "token_binary_kl":
        return _binary_kl(mismatch)
    log_ratio = mismatch.log_ratio()
    value = {
        "k1": -log_ratio,
        "k2": 0.5 * log_ratio.square(),
        "k3": log_ratio.exp() - 1 - log_ratio,
    }[estimator]
    if over == "token":
        return value
    rows, mask = mismatch.rows, mismatch.mask
    if over == "seq_max":
        return rows.spread(rows.masked_max(value, mask, empty=0.0))
    return rows.spread(
        rows.masked_sum(value, mask) if over == "seq_sum" else rows.masked_mean(value, mask)
    )


def _binary_kl(mismatch: Mismatch) -> Tensor:
    epsilon = 1e-6
    log_new = torch.where(mismatch.mask, mismatch.logprobs.detach(), -1.0)
    new = log_new.exp().clamp(epsilon, 1 - epsilon)
    old = (log_new - mismatch.log_ratio()).exp().clamp(epsilon, 1 - epsilon)
    forward = new * (new / old).log() + (1 - new) * ((1 - new) / (1 - old)).log()
    backward = old * (old / new).log() + (1 - old) * ((1 - old) / (1 - new)).log()
    return torch.maximum(forward, backward)


def veto(mismatch: Mismatch, *, floor: float) -> Tensor:
    """Leave out a row if any of its tokens has rho < floor: text that pi would not have written."""
    smallest = mismatch.rows.masked_min(mismatch.log_ratio(bound=None), mismatch.mask, empty=0.0)
    return mismatch.rows.spread(smallest >= math.log(floor))


def dppo(mismatch: Mismatch, *, measure: str, low: float, high: float) -> Tensor:
    """The DPPO mask: leave out a token that moved away from the rollout policy too far already.

    Where A > 0: pi - pi_rollout <= high; where A <= 0: pi_rollout - pi <= low (measure "tv"), or the
    binary KL(pi_rollout, pi) within the same bounds on the same sides ("kl"). arXiv:2602.04879.
    """
    assert mismatch.advantages is not None, "the DPPO mask looks at advantages"
    log_new = torch.where(mismatch.mask, mismatch.logprobs.detach(), 0.0)
    log_old = log_new - mismatch.log_ratio(bound=None)
    new, old = log_new.exp(), log_old.exp()
    gain = torch.where(mismatch.mask, mismatch.advantages, 0.0) > 0
    if measure == "tv":
        return torch.where(gain, new - old <= high, old - new <= low)
    moved = old * (log_old - log_new) + (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    return torch.where(gain, (moved <= high) | (new <= old), (moved <= low) | (new >= old))


def off_policy_sequence(mismatch: Mismatch, *, threshold: float) -> Tensor:
    """Leave out what is both bad and stale: A < 0 and the row's mean of -log rho above threshold.

    DeepSeek-V3.2, arXiv:2512.02556; TRL's off_policy_mask_threshold.
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
    """(weights [T], product of the weights, 0 where masked; kept [T] bool: mask and all verdicts)."""
    weights = mismatch.mask.to(mismatch.logprobs.dtype)
    kept = mismatch.mask
    for function, params in steps:
        factor = function(mismatch, **params)
        if factor.dtype == torch.bool:
            kept = kept & factor
        else:
            weights = weights * torch.where(mismatch.mask, factor, 0.0)
    return weights, kept
