"""What a policy loss is given and what it returns. The losses are in engines/losses.py."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engines.jagged import Rows
from engines.metric_sums import MetricSums, largest_of, mean_over

LOG_RATIO_BOUND = 20.0  # nats; beyond it a ratio is constant, so that exp cannot overflow


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyBatch:
    """One micro-batch of whole rows, response tokens only; every [T] tensor in the order of rows.

    Only `logprobs` and `entropy` carry gradients. What stands under mask 0 is never used.
    """

    rows: Rows
    mask: Tensor  # bool [T]; True where the policy wrote the token and it counts in the loss
    logprobs: Tensor  # [T] of the policy that trains, nats, under the sampling temperature
    advantages: Tensor  # [T]
    old_logprobs: Tensor | None = None  # [T] proximal policy; None: equal to logprobs, detached
    rollout_logprobs: Tensor | None = None  # [T] behaviour policy, from the rollout engine
    ref_logprobs: Tensor | None = None  # [T] frozen reference
    entropy: Tensor | None = None  # [T] of the policy that trains, nats
    weights: Tensor | None = (
        None  # [T] factors on the loss; None: made by the objective's correction
    )
    kept: Tensor | None = None  # bool [T] the correction's verdicts that belong to `weights`
    # Chosen over the whole mini-batch by Objective.select; None: over this batch, where it is whole.
    selected: Tensor | None = None  # bool [T] tokens that the method treats apart
    counted: Tensor | None = None  # bool [T] tokens whose entropy is high enough to count

    @property
    def proximal(self) -> Tensor:
        """Log-probs of the policy at the start of the step [T], detached."""
        source = self.logprobs if self.old_logprobs is None else self.old_logprobs
        return source.detach()

    def under_mask(self, values: Tensor) -> Tensor:
        """values [T] with 0 where masked, in value and gradient."""
        return torch.where(self.mask, values, 0.0)

    def log_ratio(self, bound: float | None = LOG_RATIO_BOUND) -> Tensor:
        """log pi / pi_old [T], 0 where masked; kept within the bound (no gradient beyond it)."""
        ratio = self.under_mask(self.logprobs) - self.under_mask(self.proximal)
        return ratio if bound is None else ratio.clamp(-bound, bound)

    def log_ratio_at(self, level: str) -> Tensor:
        """log ratio [T] of each token ("token"), or the mean of its row's ("sequence", as GSPO)."""
        if level == "token":
            return self.log_ratio()
        row_mean = self.rows.masked_mean(self.log_ratio(bound=None), self.mask)
        return self.under_mask(self.rows.spread(row_mean))

    def signal(self) -> Tensor:
        """Advantages [T], detached, 0 where masked."""
        return self.under_mask(self.advantages.detach())


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLoss:
    """A method's result before aggregation."""

    values: Tensor  # [T], with gradient; finite everywhere
    metrics: MetricSums = field(default_factory=MetricSums)


def ratio_metrics(batch: PolicyBatch, log_ratio: Tensor, **shares: Tensor) -> MetricSums:
    """KL of the old policy from the new by k1 (mean of -log ratio), the largest ratio, and shares.

    A share is the mean of a bool [T] over the tokens with mask 1.
    """
    return MetricSums(
        means={"kl_old": mean_over(-log_ratio, batch.mask)}
        | {name: mean_over(chosen, batch.mask) for name, chosen in shares.items()},
        maxima={"ratio_max": largest_of(log_ratio.detach().exp(), batch.mask)},
    )
