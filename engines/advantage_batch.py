"""What an advantage estimator is given and what it returns. The estimators: engines/advantages.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engines.jagged import Kept, Rows
from engines.metric_sums import MetricSums


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageBatch:
    """A whole batch (all groups complete), response tokens only, on one device.

    What stands under mask 0 is never used.
    """

    rows: Rows
    mask: Tensor  # bool [T]; True where the policy wrote the token
    rewards: Tensor  # float [N], one per sample; NaN: the sample has none and gets advantage 0
    groups: Tensor  # int64 [N]; samples of one prompt share a number, in any order
    token_rewards: Tensor | None = None  # [T]; the rewards of the tokens, instead of `rewards`
    values: Tensor | None = None  # [T] of the critic
    logprobs: Tensor | None = None  # [T] of the policy before the update (old_logprobs)
    ref_logprobs: Tensor | None = None  # [T]
    sum_pi_squared: Tensor | None = None  # [T] sum over the vocabulary of pi^2
    correction_weights: Tensor | None = None  # [T] behaviour-policy weights
    baselines: Tensor | None = None  # [N] reward of the greedy completion of the sample's prompt
    steps: Tensor | None = None  # int64 [T]; number of the turn of each token, ascending in a row
    states: Tensor | None = None  # int64 [T]; equal where the token's turn began in equal states
    components: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [N] partial rewards

    def totals(self) -> Tensor:
        """Reward of each sample [N]: the sum of its token rewards, where there are such."""
        if self.token_rewards is None:
            return self.rewards
        return self.rows.masked_sum(self.token_rewards, self.mask)

    def dense(self) -> Tensor:
        """Reward of each token [T]: `rewards` stands on the last token with mask 1."""
        if self.token_rewards is not None:
            return self.token_rewards.where(self.mask, 0.0)
        kept = self.rows.kept(self.mask)
        return kept.put(self.dense_kept(kept))

    def dense_kept(self, kept: Kept) -> Tensor:
        """As dense, of the tokens with mask 1 only; kept: rows.kept(mask)."""
        if self.token_rewards is not None:
            return kept.take(self.token_rewards)
        dense = self.rewards.new_zeros(kept.rows.ids.numel())
        filled, last = kept.rows.ends()
        dense[last] = self.rewards[filled]
        return dense

    def at_tokens(self, per_row: Tensor) -> Tensor:
        """A number per sample [N] at each of its tokens [T], 0 where masked, in rewards' dtype."""
        return torch.where(self.mask, self.rows.spread(per_row.to(self.rewards.dtype)), 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """An estimator's result, detached."""

    advantages: Tensor  # [T], 0 where masked
    returns: Tensor | None = None  # [T], targets of a critic; None: the method has none
    metrics: MetricSums = field(default_factory=MetricSums)
