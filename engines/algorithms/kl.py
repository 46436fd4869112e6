"""KL divergences of two policies, estimated from the log-probs of sampled tokens.

Here: the estimators k1, k2, k3 (one function each for the whole tree), the KL of "this token or any
other" with DPPO's trust region made from it, and the KL that is taken off the rewards. The KL in the
loss is put there by objective.py; the coefficient that follows the KL is in kl_controller.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engines.algorithms.aggregation import MetricSums, mean_over
from engines.algorithms.inputs import LOG_RATIO_BOUND, AdvantageBatch

K3_BOUND = 10.0  # nats, on k3 as a penalty

KLEstimator = Callable[[Tensor], Tensor]  # of log r [T] = log q - log p, tokens sampled from p
KLPenalty = Callable[[Tensor, Tensor], Tensor]  # of logprobs [T], ref_logprobs [T]


def k1(log_ratio: Tensor) -> Tensor:
    """KL(p, q) by -log r with r = q / p: unbiased, may be negative.

    Schulman 2020, http://joschu.net/blog/kl-approx.html.

    Args:
        log_ratio: [T], log q - log p of tokens sampled from p, in nats.

    Returns:
        [T], nats; the mean over tokens is the estimate.
    """
    return -log_ratio


def absolute(log_ratio: Tensor) -> Tensor:
    """|log r| of each token: no KL, but a distance that never is negative. As `k1`."""
    return log_ratio.abs()


def k2(log_ratio: Tensor) -> Tensor:
    """KL(p, q) by (log r)^2 / 2: biased, little variance. As `k1`.

    With p the policy that trains, its gradient is an unbiased one of KL(p, q).
    """
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """KL(p, q) by r - log r - 1: unbiased and never negative. As `k1`."""
    return log_ratio.exp() - log_ratio - 1


def bounded_k3(log_ratio: Tensor) -> Tensor:
    """k3 with log r within 20 nats and at most 10 nats, without gradient beyond (verl). As `k1`."""
    return k3(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).clamp(-K3_BOUND, K3_BOUND)


DIVERGENCES: Mapping[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}  # of a rejection


def penalty(estimator: KLEstimator) -> KLPenalty:
    """The estimator as a penalty on logprobs [T] (p) for leaving ref_logprobs [T] (q)."""

    def value(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return estimator(ref_logprobs - logprobs)

    return value


def straight_through(estimator: KLEstimator) -> KLPenalty:
    """As `penalty`, with the gradient of k2 (verl's `+` forms)."""

    def value_with_k2_gradient(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        log_ratio = ref_logprobs - logprobs
        surrogate = k2(log_ratio)
        return surrogate + (estimator(log_ratio) - surrogate).detach()

    return value_with_k2_gradient


_PENALTIES: Mapping[str, KLEstimator] = {"k1": k1, "abs": absolute, "k2": k2, "k3": bounded_k3}
KL_ESTIMATORS: Mapping[str, KLPenalty] = {  # by the name in a recipe (algorithm.kl.estimator)
    **{name: penalty(estimator) for name, estimator in _PENALTIES.items()},
    **{f"{name}+": straight_through(estimator) for name, estimator in _PENALTIES.items()},
}


def binary_kl(p: Tensor, q: Tensor, log_ratio: Tensor, epsilon: float = 0.0) -> Tensor:
    """KL of "this token or any other": p log(p / q) + (1 - p) log((1 - p) / (1 - q)).

    A lower bound of the KL over the whole vocabulary. arXiv:2602.04879.

    Args:
        p: [T], probability of the token under the policy that the KL is weighed by.
        q: [T], its probability under the other policy.
        log_ratio: [T], log p - log q in nats, which callers know better than it can be had from p
            and q.
        epsilon: added to 1 - p and to 1 - q in the logarithm.

    Returns:
        [T], nats.
    """
    return p * log_ratio + (1 - p) * torch.log((1 - p + epsilon) / (1 - q + epsilon))


def inside_trust_region(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    measure: str,
    low: float,
    high: float,
) -> Tensor:
    """DPPO's mask: False where a token has moved too far already, and on in the same direction.

    "tv", the token's part in the total variation: where A > 0, pi - pi_old <= high; where A <= 0,
    pi_old - pi <= low. "kl": binary_kl(pi_old, pi) within the same bounds, and True wherever the
    move was against the advantage. arXiv:2602.04879.

    Args:
        logprobs: [T] of the policy that trains, nats, detached.
        old_logprobs: [T] of the policy that the region is around, nats, detached.
        advantages: [T], of which the sign counts.
        measure: "tv" or "kl".
        low: bound where A <= 0; a probability ("tv") or nats ("kl").
        high: bound where A > 0, likewise.

    Returns:
        bool [T].
    """
    new, old, gain = logprobs.exp(), old_logprobs.exp(), advantages > 0
    if measure == "tv":
        return torch.where(gain, new - old <= high, old - new <= low)
    moved = binary_kl(old, new, old_logprobs - logprobs, epsilon=1e-8)
    return torch.where(gain, (moved <= high) | (new <= old), (moved <= low) | (new >= old))


def penalised_rewards(
    batch: AdvantageBatch, estimator: str, coefficient: float
) -> tuple[Tensor, MetricSums]:
    """Token rewards less a KL penalty: r_t - coefficient * d_t, 0 where masked.

    Args:
        batch: with logprobs (of the policy before the update) and ref_logprobs.
        estimator: of d_t, a name in KL_ESTIMATORS.
        coefficient: reward per nat.

    Returns:
        [T] rewards, and the metric kl_ref: the mean over all N rows of each row's token mean, as
        the adaptive controller wants it (verl); an empty row counts as 0.
    """
    assert batch.logprobs is not None and batch.ref_logprobs is not None, "a KL needs two policies"
    new, reference = (x.where(batch.mask, 0.0) for x in (batch.logprobs, batch.ref_logprobs))
    divergence = KL_ESTIMATORS[estimator](new, reference)
    per_row = batch.rows.masked_mean(divergence, batch.mask)
    every = torch.ones_like(per_row, dtype=torch.bool)
    metrics = MetricSums(means={"kl_ref": mean_over(per_row, every)})
    return batch.dense() - coefficient * torch.where(batch.mask, divergence, 0.0), metrics
