"""Distillation: how far a student is from its teacher, and by which gradient it moves there.

A distribution over words comes as log-probs of bins: each word its own, or the teacher's k likeliest
words and one bin for all others, the tail. Merging words into bins never makes a KL larger, and
without the tail it is no KL at all: it may be negative, and its gradient is another one.

Four losses, by the gradient that they produce (pi the student, tau the teacher, y ~ pi):

- KL(pi, tau) as an advantage (`reverse_kl_advantages`): E[grad log pi(y) A(y)] with
  A = -(log pi - log tau) is -grad KL(pi, tau), exactly. The same number back-propagated teaches
  nothing: the gradient of log pi(y) - log tau(y) has no teacher in it, and its mean is 0.
- KL(tau, pi) over bins (`forward_kl`): covers what the teacher would say.
- KL(pi, tau) over bins (`reverse_kl`): the exact sum, where the first one has a sample.
- JSD(tau, pi) over bins (`generalized_jsd`): between the last two, and bounded.

GKD, arXiv:2306.13649; MiniLLM, arXiv:2306.08543, with the reverse KL as a reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engines.algorithms.aggregation import MetricSums, mean_over
from engines.algorithms.inputs import AdvantageBatch, Advantages, PolicyBatch

BinDivergence = Callable[..., Tensor]  # of the student's, the teacher's bins [T, B], parameters


def reverse_kl_advantages(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """A = -(log pi(y) - log tau(y)) of each sampled token; its mean is -KL(pi, tau).

    k1 (kl.py) as an advantage, one token at a time: the KL of later tokens is left out of it, which
    makes it the gradient of the sum of the KLs at the states that were visited.

    Args:
        logprobs: [T] of the student before the update, nats.
        teacher_logprobs: [T], of the same tokens under the same temperature, nats.

    Returns:
        [T], nats, detached; 0 where both agree.
    """
    return (teacher_logprobs - logprobs).detach()


def no_advantages(batch: AdvantageBatch, **_: Any) -> Advantages:
    """0 at each token, whatever the rewards: where a teacher alone teaches."""
    return Advantages(advantages=batch.rewards.new_zeros(batch.mask.shape))


def forward_kl(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """KL(tau, pi) = sum_b tau_b (log tau_b - log pi_b) of each token.

    Args:
        logprobs: [T, B] of the student's bins, nats, finite, with gradient.
        teacher_logprobs: [T, B] of the teacher's, nats, finite.

    Returns:
        [T], nats, with gradient.
    """
    return (teacher_logprobs.exp() * (teacher_logprobs - logprobs)).sum(-1)


def reverse_kl(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """KL(pi, tau) = sum_b pi_b (log pi_b - log tau_b) of each token. Arguments as `forward_kl`."""
    return (logprobs.exp() * (logprobs - teacher_logprobs)).sum(-1)


def generalized_jsd(logprobs: Tensor, teacher_logprobs: Tensor, beta: float = 0.5) -> Tensor:
    """JSD(beta) = beta KL(tau, m) + (1 - beta) KL(pi, m), with m = beta tau + (1 - beta) pi.

    GKD (arXiv:2306.13649), equation 1. At most the entropy of (beta, 1 - beta). JSD / beta goes to
    KL(tau, pi) as beta goes to 0, and JSD / (1 - beta) to KL(pi, tau) as it goes to 1, value and
    gradient.

    Args:
        logprobs: [T, B] of the student's bins, nats, finite, with gradient.
        teacher_logprobs: [T, B] of the teacher's, nats, finite.
        beta: in (0, 1), the teacher's share of the mixture m.

    Returns:
        [T], nats, with gradient.
    """
    parts = torch.stack([teacher_logprobs + math.log(beta), logprobs + math.log1p(-beta)])
    mixture = parts.logsumexp(0)
    return beta * forward_kl(mixture, teacher_logprobs) + (1 - beta) * forward_kl(mixture, logprobs)


def with_tail(words: Tensor, tail: Tensor) -> Tensor:
    """The bins [T, k + 1] of k words [T, k] and of all others together, [T]; log-probs."""
    return torch.cat([words, tail[:, None]], dim=-1)


BIN_DIVERGENCES: Mapping[str, BinDivergence] = {  # by algorithm.distillation.loss
    "forward_kl_topk": forward_kl,
    "reverse_kl_topk": reverse_kl,
    "jsd_topk": generalized_jsd,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationTerm:
    """A recipe's distillation as a part of the update's objective.

    One token, the teacher's likeliest word of two with 0.9 and the student's 0.6:

        batch.student_bins = log [[0.6, 0.4]]; batch.teacher_bins = log [[0.9, 0.1]]
        values, metrics = DistillationTerm(loss="forward_kl_topk", coefficient=1.0)(batch)
        # values [0.2263]; metrics teacher_mass 0.9, student_mass 0.6
    """

    loss: str  # a name of BIN_DIVERGENCES; another one's gradient is in the advantages already
    coefficient: float  # per nat
    params: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the divergence

    @property
    def needs(self) -> frozenset[str]:
        """Columns that a batch must have."""
        by_words = {"teacher_topk_ids", "teacher_topk_logprobs", "teacher_tail_logprobs"}
        return frozenset({"teacher_logprobs"} | (by_words if self.by_words else set()))

    @property
    def by_words(self) -> bool:
        """Whether it compares the log-probs of the teacher's likeliest words."""
        return self.loss in BIN_DIVERGENCES

    def __call__(self, batch: PolicyBatch) -> tuple[Tensor | None, MetricSums]:
        """The divergence of each token [T], with gradient; None where there is no term of the loss.

        Metrics: reverse_kl, the mean of log pi - log tau over the sampled tokens (k1), in nats; with
        words the divergence itself, and the probability of those words (teacher_mass, student_mass).
        """
        assert batch.teacher_logprobs is not None, "see `needs`"
        gap = batch.logprobs.detach() - batch.teacher_logprobs
        means = {"reverse_kl": mean_over(gap, batch.mask)}
        divergence = None
        if self.by_words:
            assert batch.student_bins is not None and batch.teacher_bins is not None, "see `needs`"
            # Before the divergence: a NaN under mask 0 would come back in the gradient.
            student, teacher = (
                torch.where(batch.mask[:, None], bins, 0.0)
                for bins in (batch.student_bins, batch.teacher_bins)
            )
            divergence = BIN_DIVERGENCES[self.loss](student, teacher, **self.params)
            means[self.loss] = mean_over(divergence, batch.mask)
            for whose, bins in (("teacher", teacher), ("student", student)):
                means[f"{whose}_mass"] = mean_over(-bins[:, -1].detach().expm1(), batch.mask)
        named = {f"distillation/{name}": value for name, value in means.items()}
        return divergence, MetricSums(means=named)
