"""What estimators (AdvantageBatch) and policy losses (PolicyBatch) are given, and what they answer.

N samples are N rows of T response tokens in all, one after the other without padding; prompts are not
in them. A row may be empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engines.algorithms.aggregation import Kept, MetricSums, Rows, largest_of, mean_over

LOG_RATIO_BOUND = 20.0  # nats; beyond it a ratio is constant, so that exp cannot overflow


@dataclass(frozen=True, kw_only=True, slots=True)
class Paths:
    """Where N samples lie in the trees of their prompts: the S segments that they consist of.

    Two samples of 5 and 4 tokens whose first 3 are a segment of both:

        Paths(
            rows=Rows.of_lengths(tensor([2, 2])),
            nodes=tensor([1, 2, 1, 3]),
            lengths=tensor([3, 2, 3, 1]),
        )
    """

    rows: Rows  # N rows, S segments, from the prompt to the leaf
    nodes: Tensor  # int64 [S]; number, from 0, in the prompt's tree; a node has one node before it
    lengths: Tensor  # int64 [S]; response tokens

    @classmethod
    def flat(cls, rows: Rows) -> Paths:
        """Every sample a path of its own, of one segment."""
        count = rows.count
        ids = torch.arange(count, device=rows.offsets.device)
        return cls(rows=Rows.padded(count, 1, ids.device), nodes=ids, lengths=rows.lengths)

    def inner(self) -> Tensor:
        """Whether a segment has another one after it in its row, bool [S]."""
        return self.rows.within() + 1 < self.rows.lengths[self.rows.ids]

    def keys(self, groups: Tensor) -> Tensor:
        """Numbers that are equal for segments of one node, int64 [S].

        groups: int64 [N], from 0; samples of one prompt share a number.
        """
        most = int(self.nodes.max()) + 1 if self.nodes.numel() else 1
        return groups[self.rows.ids] * most + self.nodes

    def starts(self, tokens: Rows) -> Tensor:
        """Place of each segment's first token among the T tokens of the samples, int64 [S]."""
        ends = self.lengths.cumsum(0)
        before = ends - self.lengths
        first = torch.cat([before, before.new_zeros(1)])[self.rows.offsets[:-1]]
        return before - first[self.rows.ids] + tokens.offsets[self.rows.ids]

    def of_tokens(self, tokens: Rows) -> Tensor:
        """The segment of each of the T tokens of the samples, -1 past the last one; int64 [T]."""
        places = torch.full_like(tokens.ids, -1)
        inside = Rows.of_lengths(self.lengths)
        places[self.starts(tokens)[inside.ids] + inside.within()] = inside.ids
        return places


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageBatch:
    """A whole batch (all groups complete), response tokens only, on one device.

    What stands under mask 0 is never used.

    Two prompts, three samples of 2, 1 and 3 tokens; the last one's second token is a tool's:

        batch = AdvantageBatch(
            rows=Rows.of_lengths(tensor([2, 1, 3])),
            mask=tensor([True, True, True, True, False, True]),
            rewards=tensor([1.0, 0.0, 0.5]),
            groups=tensor([7, 7, 9]),
        )
        dr_grpo(batch, lone="zero").advantages
        # tensor([0.5, 0.5, -0.5, 0.0, 0.0, 0.0])
    """

    rows: Rows  # N rows, T tokens
    mask: Tensor  # bool [T]; True where the policy wrote the token
    rewards: Tensor  # float [N], one per sample; NaN: the sample has none and gets advantage 0
    groups: Tensor  # int64 [N]; samples of one prompt share a number, in any order
    token_rewards: Tensor | None = None  # [T]; the rewards of the tokens, instead of `rewards`
    values: Tensor | None = None  # [T] of the critic
    logprobs: Tensor | None = None  # [T] of the policy before the update (old_logprobs)
    ref_logprobs: Tensor | None = None  # [T]
    teacher_logprobs: Tensor | None = None  # [T] of the teacher, in distillation
    sum_pi_squared: Tensor | None = None  # [T] sum over the vocabulary of pi^2
    correction_weights: Tensor | None = None  # [T] behaviour-policy weights
    baselines: Tensor | None = None  # [N] reward of the greedy completion of the sample's prompt
    steps: Tensor | None = None  # int64 [T]; number of the turn of each token, ascending in a row
    states: Tensor | None = None  # int64 [T]; equal where the token's turn began in equal states
    tasks: Tensor | None = None  # int64 [N]; samples of one task share a number; None: one task
    paths: Paths | None = None  # of the samples in the trees of their prompts; None: no trees
    components: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [N] partial rewards
    # Of batches that stand for more than they hold, see engines/data/advantage_parts.py:
    counts: Tensor | None = None  # float64 [N] tokens with mask 1; None: those of `mask`
    moments: tuple[Tensor, Tensor] | None = None  # to whiten by; None: those of these tokens
    turn_advantages: Tensor | None = None  # [K] of these turns among all; None: among these

    def tokens(self) -> Tensor:
        """Tokens with mask 1 of each sample, float64 [N]."""
        return self.rows.tokens(self.mask, torch.float64) if self.counts is None else self.counts

    def paths_or_flat(self) -> Paths:
        """The paths; where there are no trees, each sample is a path of one segment."""
        return Paths.flat(self.rows) if self.paths is None else self.paths

    def totals(self) -> Tensor:
        """Reward of each sample [N]: the sum of its tokens' rewards under mask 1, if any."""
        if self.token_rewards is None:
            return self.rewards
        return self.rows.masked_sum(self.token_rewards, self.mask)

    def dense(self) -> Tensor:
        """Reward of each token [T]: `rewards` stands on the last token with mask 1."""
        if self.token_rewards is not None:
            return self.token_rewards.where(self.mask, 0.0)
        tokens = self.rows.kept(self.mask)
        return tokens.put(self.dense_kept(tokens))

    def dense_kept(self, tokens: Kept) -> Tensor:
        """As dense, of the tokens with mask 1 only: [kept]; tokens: rows.kept(mask)."""
        if self.token_rewards is not None:
            return tokens.take(self.token_rewards)
        dense = self.rewards.new_zeros(tokens.rows.ids.numel())
        filled, last = tokens.rows.ends()
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
    mask: Tensor | None = None  # bool [T]; the tokens that train, where not all of the batch's do
    metrics: MetricSums = field(default_factory=MetricSums)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyBatch:
    """One micro-batch of whole rows, response tokens only; every [T] tensor in the order of rows.

    Only `logprobs` and `entropy` carry gradients. What stands under mask 0 is never used.

    Two rows of 2 and 1 tokens; the policy has moved by log 1.5 at the second token:

        batch = PolicyBatch(
            rows=Rows.of_lengths(tensor([2, 1])),
            mask=tensor([True, True, True]),
            logprobs=tensor([-1.0, -0.6, -2.0], requires_grad=True),
            advantages=tensor([0.5, 0.5, -0.5]),
            old_logprobs=tensor([-1.0, -1.0055, -2.0]),
        )
        batch.log_ratio()  # tensor([0.0, 0.4055, 0.0])
        gspo(batch, clip_low=0.1, clip_high=0.1).values  # tensor([-0.55, -0.55, 0.5])
    """

    rows: Rows  # N rows, T tokens
    mask: Tensor  # bool [T]; True where the policy wrote the token and it counts in the loss
    logprobs: Tensor  # [T] of the policy that trains, nats, under the sampling temperature
    advantages: Tensor  # [T]
    old_logprobs: Tensor | None = None  # [T] proximal policy; None: equal to logprobs, detached
    rollout_logprobs: Tensor | None = None  # [T] behaviour policy, from the rollout engine
    staleness: Tensor | None = None  # [T] versions between the behaviour and the proximal policy
    ref_logprobs: Tensor | None = None  # [T] frozen reference
    entropy: Tensor | None = None  # [T] of the policy that trains, nats
    teacher_logprobs: Tensor | None = None  # [T] of the teacher, in distillation
    student_bins: Tensor | None = None  # [T, B] of the policy that trains, with gradient
    teacher_bins: Tensor | None = None  # [T, B] of the same words and the tail (distillation.py)
    weights: Tensor | None = None  # [T] factors on the loss; None: the objective's correction
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
        """log pi / pi_old [T] in nats, 0 where masked; within the bound, no gradient beyond it."""
        ratio = self.under_mask(self.logprobs) - self.under_mask(self.proximal)
        return ratio if bound is None else ratio.clamp(-bound, bound)

    def log_ratio_at(self, level: str) -> Tensor:
        """The log ratio that a loss takes for each token [T], in nats, 0 where masked.

        level: "token", its own within 20 nats; "sequence", the mean over its row's tokens with mask
        1 (the log of the geometric mean), not bounded.
        """
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
    """The metrics that every ratio loss has, over the tokens with mask 1.

    kl_old, KL(pi_old, pi) by k1, the mean of -log r in nats; ratio_max, the largest r.

    Args:
        batch: the micro-batch.
        log_ratio: log r [T] in nats, as the loss uses it.
        shares: further means by name, each of a [T] tensor; of a bool it is the share that is True.
    """
    return MetricSums(
        means={"kl_old": mean_over(-log_ratio, batch.mask)}
        | {name: mean_over(chosen, batch.mask) for name, chosen in shares.items()},
        maxima={"ratio_max": largest_of(log_ratio.detach().exp(), batch.mask)},
    )
