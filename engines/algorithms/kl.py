"""KL penalties between two policies, from the log-probs of sampled tokens, and their controllers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engines.algorithms.inputs import AdvantageBatch
from engines.algorithms.metric_sums import MetricSums, mean_over

DIFFERENCE_BOUND = 20.0  # nats, on log ref/pi in k3
K3_BOUND = 10.0  # nats


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log pi - log ref, per token [T]. Unbiased, may be negative."""
    return logprobs - ref_logprobs


def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """|log pi - log ref|, per token [T]."""
    return (logprobs - ref_logprobs).abs()


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log pi - log ref)^2 / 2, per token [T]. Its gradient is an unbiased one of KL(pi, ref)."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log ref - log pi, per token [T]. Unbiased and never negative.

    Schulman 2020, http://joschu.net/blog/kl-approx.html. d is bounded by 20 nats, the result by 10.
    """
    difference = (ref_logprobs - logprobs).clamp(-DIFFERENCE_BOUND, DIFFERENCE_BOUND)
    return (difference.exp() - difference - 1).clamp(-K3_BOUND, K3_BOUND)


def straight_through(
    estimator: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor], Tensor]:
    """The estimator's value with the gradient of k2 (the `+` forms)."""

    def value_with_k2_gradient(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        surrogate = k2(logprobs, ref_logprobs)
        return surrogate + (estimator(logprobs, ref_logprobs) - surrogate).detach()

    return value_with_k2_gradient


_PLAIN: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
}
KL_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    **_PLAIN,
    **{f"{name}+": straight_through(function) for name, function in _PLAIN.items()},
}


def penalised_rewards(
    batch: AdvantageBatch, estimator: str, coefficient: float
) -> tuple[Tensor, MetricSums]:
    """Token rewards [T] minus coefficient * KL of each token, 0 where masked; metrics.

    kl_ref is the mean over the rows of each row's token mean, as the controller wants it (verl);
    an empty row counts as 0.
    """
    assert batch.logprobs is not None and batch.ref_logprobs is not None, "a KL needs two policies"
    new, reference = (x.where(batch.mask, 0.0) for x in (batch.logprobs, batch.ref_logprobs))
    divergence = KL_ESTIMATORS[estimator](new, reference)
    per_row = batch.rows.masked_mean(divergence, batch.mask)
    every = torch.ones_like(per_row, dtype=torch.bool)
    metrics = MetricSums(means={"kl_ref": mean_over(per_row, every)})
    return batch.dense() - coefficient * torch.where(batch.mask, divergence, 0.0), metrics
