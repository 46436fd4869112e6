"""What a policy loss is given and what it returns. The losses are in engines/losses.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from engines.jagged import Rows
from engines.metric_sums import MetricSums


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyBatch:
    """One micro-batch of whole rows, response tokens only; every [T] tensor in the order of rows.

    Only `logprobs` and `entropy` carry gradients.
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
    selected: Tensor | None = None  # bool [T] from the method's `select` over the whole mini-batch

    @property
    def proximal(self) -> Tensor:
        """Log-probs of the policy at the start of the step [T], detached."""
        source = self.logprobs if self.old_logprobs is None else self.old_logprobs
        return source.detach()

    def log_ratio(self) -> Tensor:
        """log pi / pi_old [T]; 0 (value and gradient) where masked, whatever stands there."""
        ratio = self.logprobs.where(self.mask, 0.0) - self.proximal.where(self.mask, 0.0)
        return ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLoss:
    """A method's result before aggregation."""

    values: Tensor  # [T], with gradient; anything where masked
    metrics: MetricSums = field(default_factory=MetricSums)
