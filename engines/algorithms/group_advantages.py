"""Advantages from one reward per sample, compared within its group. r is the reward, g the group.

Each takes an AdvantageBatch of N samples and T tokens and answers Advantages [T]: every token of a
sample gets the sample's advantage, masked ones 0; returns are the same numbers. Means and deviations
are over samples, with the divisors n and n - 1, where not said otherwise. `lone` says what a group of
one gets: "reward" (its reward as it is, as in verl) or "zero". A sample without a reward (NaN) counts
nowhere and gets 0. epsilon is added to a deviation, in units of reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.algorithms.aggregation import Rows, divide
from engines.algorithms.inputs import AdvantageBatch, Advantages


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Which samples belong together. Samples in no order, group numbers of any kind.

    Four samples of two prompts, of which one has no reward:

        rewards = tensor([1.0, 5.0, 3.0, nan])
        groups = Groups.of(tensor([7, 4, 7, 4]), ~rewards.isnan())
        groups.member          # tensor([1, 0, 1, 0])
        groups.sizes           # tensor([1.0, 2.0])
        groups.mean(rewards)   # tensor([5.0, 2.0])
        groups.alone()         # tensor([False, True, False, True])
    """

    member: Tensor  # int64 [N]; group of each sample, numbered from 0 in the order of the ids
    present: Tensor  # bool [N]; False for a sample that does not count
    sizes: Tensor  # float64 [G]; samples present

    @classmethod
    def of(cls, ids: Tensor, present: Tensor | None = None) -> Groups:
        """Groups from ids [N]; present, bool [N]: samples that count (None: all of them)."""
        unique, member = torch.unique(ids, return_inverse=True)
        if present is None:
            present = torch.ones_like(ids, dtype=torch.bool)
        sizes = torch.zeros(unique.numel(), dtype=torch.float64, device=ids.device)
        return cls(
            member=member, present=present, sizes=sizes.index_add_(0, member, present.double())
        )

    def sum(self, values: Tensor) -> Tensor:
        """Sum of each group's present values: [N] -> float64 [G]."""
        counted = torch.where(self.present, values.double(), 0.0)
        return torch.zeros_like(self.sizes).index_add_(0, self.member, counted)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of each group's present values: [N] -> float64 [G]; 0 for a group without any."""
        return self.sum(values) / self.sizes.clamp(min=1)

    def deviation(self, values: Tensor) -> Tensor:
        """Standard deviation (divisor n - 1) of each group: [N] -> float64 [G]; 0 for one sample.

        Exactly 0 where the values are equal, whatever the rounding of their mean.
        """
        centred = values.double() - self.mean(values)[self.member]
        spread = (self.sum(centred.square()) / (self.sizes - 1).clamp(min=1)).sqrt()
        return torch.where(self.uniform(values), 0.0, spread)

    def uniform(self, values: Tensor) -> Tensor:
        """Whether all present values of each group are equal: [N] -> bool [G]."""
        return self.largest(values) == self.smallest(values)

    def largest(self, values: Tensor) -> Tensor:
        """Largest present value of each group: [N] -> float64 [G]; -inf for a group without any."""
        counted = torch.where(self.present, values.double(), float("-inf"))
        start = torch.full_like(self.sizes, float("-inf"))
        return start.scatter_reduce_(0, self.member, counted, "amax")

    def smallest(self, values: Tensor) -> Tensor:
        """Smallest present value of each group: [N] -> float64 [G]; inf for a group without any."""
        return -self.largest(-values)

    def alone(self) -> Tensor:
        """Whether the sample's group has just one sample that is present: bool [N]."""
        return (self.sizes == 1)[self.member]

    def ranks(self, values: Tensor) -> Tensor:
        """Place of each sample in its group, 0 for the largest value; ties by order [N].

        Samples that do not count come last.
        """
        counted = torch.where(self.present, values.double(), float("-inf"))
        by_value = counted.argsort(descending=True, stable=True)
        order = by_value[self.member[by_value].argsort(stable=True)]
        counts = torch.bincount(self.member, minlength=self.sizes.numel())
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        return place - first[self.member]


def whitened(values: Tensor, counts: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8): mean 0 and variance 1, but 0 where there is one value.

    Args:
        values: [T] of tokens, or [N] of samples.
        counts: how often each value stands for, of the same shape (the tokens of a sample, or a
            mask as numbers); what has count 0 is transformed as the others, but not counted. None:
            each once.

    Returns:
        As values. The mean's denominator is the sum of the counts, the variance's one less.
    """
    mean, variance = moments(values, counts)
    scale = 1 / (variance + 1e-8).sqrt()
    return (values - mean).mul_(scale)


def moments(values: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and variance of values (scalars), 0 for nothing, variance 0 for one value.

    Args and denominators as for `whitened`.
    """
    nothing = values.new_zeros(())
    if counts is None:
        mean = values.mean() if values.numel() else nothing
        return mean, values.var() if values.numel() > 1 else nothing
    counted, total = torch.where(counts > 0, values, 0.0), counts.sum()
    mean = (counts * counted).sum() / total.clamp(min=1)
    squares = counts * (counted - mean).square()
    return mean, squares.sum() / (total - 1).clamp(min=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMoments:
    """What each row adds to the mean and variance of all tokens; float64 [N] each.

    A row's numbers depend on that row alone, and rows are added up in their order. So a batch that
    was cut into parts between rows has the same mean and variance as in one piece, to the bit.

    Rows [1, 3] and [5]: counts [2, 1], sums [4, 5], squares [2, 0]; combined() is (3, 4).
    """

    counts: Tensor  # tokens
    sums: Tensor
    squares: Tensor  # squared distances from the row's own mean, added up

    @classmethod
    def of(cls, values: Tensor, rows: Rows) -> RowMoments:
        """Of values [T] in N rows."""
        numbers, counts = values.double(), rows.lengths.double()
        sums = rows.sum(numbers)
        distance = numbers - rows.spread(divide(sums, counts))
        return cls(counts=counts, sums=sums, squares=rows.sum(distance.square()))

    def combined(self) -> tuple[Tensor, Tensor]:
        """Mean and variance (divisor n - 1) of all tokens, scalars; 0 where nothing defines them.

        Chan, Golub and LeVeque 1983, doi:10.1080/00031305.1983.10483115.
        """
        total = self.counts.sum()
        mean = self.sums.sum() / total.clamp(min=1)
        between = self.counts * (divide(self.sums, self.counts) - mean).square()
        squares = (self.squares + between).sum()
        return mean, squares / (total - 1).clamp(min=1)


def whitened_rows(
    values: Tensor, rows: Rows, moments: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """As `whitened`, of tokens [T] in N rows.

    moments: mean and variance to whiten by, where the rows are a part of a batch; None: their own.
    """
    mean, variance = RowMoments.of(values, rows).combined() if moments is None else moments
    return (values - mean).mul_(1 / (variance + 1e-8).sqrt())


def grpo(
    batch: AdvantageBatch,
    *,
    baseline: str,
    leave_one_out: bool,
    normalize: str,
    epsilon: float,
    lone: str,
) -> Advantages:
    """Group-relative: A_i = (r_i - mean(r_g)) / (std(r_g) + epsilon).

    GRPO, arXiv:2402.03300.

    Args:
        batch: N samples.
        baseline: the mean that is taken off: of the "group", the "batch", the sample's "task" in the
            batch, or "none".
        leave_one_out: the mean is over the others only.
        normalize: the deviation that divides: of the "group", the "batch", the "task", or "none".
        epsilon: added to the deviation.
        lone: "reward" or "zero" for a group (or batch, or task) of one.
    """
    rewards, groups = _scored(batch)
    whole = Groups.of(torch.zeros_like(batch.groups), groups.present)
    tasks = whole if batch.tasks is None else Groups.of(batch.tasks, groups.present)
    level = {"group": groups, "batch": whole, "task": tasks}
    centred = rewards.double()
    if baseline != "none":
        centred = _centred(level[baseline], rewards, leave_one_out)
    if normalize != "none":
        deviation = level[normalize].deviation(rewards)[level[normalize].member]
        deviation = torch.where(level[normalize].alone(), 1.0, deviation)
        centred = divide(centred, deviation + epsilon)
    if baseline != "none":
        divisor = 1.0 if normalize == "none" else 1.0 + epsilon
        centred = _with_lone(level[baseline], rewards, centred, lone, divisor)
    return _per_sample(batch, groups, centred)


def dr_grpo(batch: AdvantageBatch, *, lone: str) -> Advantages:
    """Dr. GRPO: A_i = r_i - mean(r_g), without the division that favours easy and hard prompts.

    arXiv:2503.20783. Its loss is aggregated by seq-mean-token-sum-norm.

    Args:
        batch: N samples.
        lone: "reward" or "zero" for a group of one.
    """
    return grpo(
        batch, baseline="group", leave_one_out=False, normalize="none", epsilon=0.0, lone=lone
    )


def rloo(batch: AdvantageBatch, *, lone: str) -> Advantages:
    """REINFORCE leave-one-out: A_i = r_i - mean of the other rewards of g. arXiv:2402.14740.

    Args:
        batch: N samples.
        lone: "reward" or "zero" for a group of one.
    """
    return grpo(
        batch, baseline="group", leave_one_out=True, normalize="none", epsilon=0.0, lone=lone
    )


def grpo_passk(batch: AdvantageBatch, *, normalize: bool, epsilon: float) -> Advantages:
    """Pass@k: only a group's best sample gets an advantage, its lead over the second best.

    A = (r_(1) - r_(2)) / (std(r_g) + epsilon) for the best, 0 for the others and for a group of
    one. arXiv:2503.19595.

    Args:
        batch: N samples.
        normalize: divide by the group's deviation.
        epsilon: added to it.
    """
    rewards, groups = _scored(batch)
    place = groups.ranks(rewards)
    best = groups.largest(rewards)
    followers = torch.where(place >= 1, rewards.double(), float("-inf"))
    second = groups.largest(followers)
    lead = torch.where(groups.sizes > 1, best - second, 0.0)
    if normalize:
        lead = divide(lead, groups.deviation(rewards) + epsilon)
    advantage = torch.where(place == 0, lead[groups.member], 0.0)
    return _per_sample(batch, groups, advantage)


def opo(batch: AdvantageBatch, *, lone: str) -> Advantages:
    """OPO: the baseline is the group's mean reward weighted by response length.

    A_i = r_i - sum_g |y| r / sum_g |y|, |y| the sample's tokens with mask 1. arXiv:2505.23585. A
    group without tokens has the baseline 0.

    Args:
        batch: N samples.
        lone: "reward" or "zero" for a group of one.
    """
    rewards, groups = _scored(batch)
    lengths = batch.tokens()
    total = groups.sum(lengths)
    weighted = groups.sum(lengths * rewards.double())
    baseline = torch.where(total > 0, weighted / total.clamp(min=1), 0.0)[groups.member]
    centred = rewards.double() - baseline
    return _per_sample(batch, groups, _with_lone(groups, rewards, centred, lone))


def gpg(batch: AdvantageBatch, *, scale: float, lone: str) -> Advantages:
    """GPG: A_i = alpha (r_i - mean(r_g)) / scale, alpha = samples / samples with non-zero reward.

    arXiv:2504.02546.

    Args:
        batch: N samples.
        scale: divisor of the advantages.
        lone: "reward" or "zero" for a group of one, times alpha / scale.
    """
    rewards, groups = _scored(batch)
    nonzero = (groups.present & (rewards != 0)).sum().clamp(min=1)
    alpha = groups.present.sum() / nonzero.double()
    centred = _centred(groups, rewards, leave_one_out=False)
    centred = _with_lone(groups, rewards, centred, lone)
    return _per_sample(batch, groups, alpha * centred / scale)


def maxrl(batch: AdvantageBatch, *, epsilon: float) -> Advantages:
    """MaxRL: A_i = (r_i - mean(r_g)) / (mean(r_g) + epsilon); 0 where the mean is not positive.

    The gradient of the log-likelihood of success instead of its probability. For rewards >= 0.
    arXiv:2602.02710.

    Args:
        batch: N samples.
        epsilon: added to the mean.
    """
    rewards, groups = _scored(batch)
    mean = groups.mean(rewards)[groups.member]
    ratio = divide(rewards.double() - mean, mean.clamp(min=0) + epsilon)
    return _per_sample(batch, groups, torch.where(mean > 0, ratio, 0.0))


def cpgd(batch: AdvantageBatch, *, weight: str, cap: float, epsilon: float) -> Advantages:
    """CPGD's weighted advantage: A_i = w (r_i - mean(r_g)).

    w = 1 ("equal"), 1 / (std(r_g) + epsilon) ("std"), or min(cap, samples / samples whose group has
    variance) ("filter": as if groups without variance had been replaced). arXiv:2505.12504.

    Args:
        batch: N samples.
        weight: "equal", "std" or "filter".
        cap: largest w of "filter".
        epsilon: added to the deviation of "std".
    """
    rewards, groups = _scored(batch)
    centred = _centred(groups, rewards, leave_one_out=False)
    if weight == "std":
        centred = divide(centred, groups.deviation(rewards)[groups.member] + epsilon)
    elif weight == "filter":
        informative = groups.present & ~groups.uniform(rewards)[groups.member]
        share = groups.present.sum().double() / informative.sum().clamp(min=1)
        centred = centred * share.clamp(max=cap)
    return _per_sample(batch, groups, centred)


def reinforce_plus_plus_baseline(batch: AdvantageBatch, *, lone: str) -> Advantages:
    """REINFORCE++ with the group's mean as baseline: whiten(r_i - mean(r_g)) over all tokens.

    The whitening counts a sample once per token with mask 1, so long answers weigh more: the mean's
    denominator is the number of tokens, the variance's one less. arXiv:2501.03262.

    Args:
        batch: N samples.
        lone: "reward" or "zero" for a group of one, before the whitening.
    """
    rewards, groups = _scored(batch)
    centred = _centred(groups, rewards, leave_one_out=False)
    centred = _with_lone(groups, rewards, centred, lone)
    return _token_whitened(batch, centred, groups.present)


def gdpo(
    batch: AdvantageBatch,
    *,
    weights: Mapping[str, float],
    normalize: bool,
    epsilon: float,
    over: str,
    lone: str,
) -> Advantages:
    """GDPO: each reward component is normalised within its group, then they are added and scaled.

    S_i = sum_k w_k A_k,i with A_k GRPO's advantage of component k; A = whiten(S) over all tokens
    (over = "tokens", as verl), or (S - mean S) / (std S + epsilon) over samples ("samples", as TRL).
    Without components the reward is the only one; a component that is NaN does not count.
    arXiv:2601.05242.

    Args:
        batch: N samples, with components.
        weights: w_k by the component's name; 1 for one that is not named.
        normalize: divide each component by its group's deviation.
        epsilon: added to deviations.
        over: "tokens" or "samples".
        lone: "reward" or "zero" for a group of one, component by component.
    """
    parts = dict(batch.components) or {"reward": batch.totals()}
    total, present = torch.zeros_like(batch.rewards, dtype=torch.float64), None
    for name, component in parts.items():
        groups = Groups.of(batch.groups, ~component.isnan())
        centred = _centred(groups, component, leave_one_out=False)
        if normalize:
            centred = divide(centred, groups.deviation(component)[groups.member] + epsilon)
        divisor = 1.0 + epsilon if normalize else 1.0
        centred = _with_lone(groups, component, centred, lone, divisor)
        total = total + weights.get(name, 1.0) * torch.where(groups.present, centred, 0.0)
        present = groups.present if present is None else present | groups.present
    assert present is not None
    if over == "samples":
        whole = Groups.of(torch.zeros_like(batch.groups), present)
        deviation = whole.deviation(total)[whole.member]
        mean = whole.mean(total)[whole.member]
        return _per_sample(batch, whole, divide(total - mean, deviation + epsilon))
    return _token_whitened(batch, total, present)


def _scored(batch: AdvantageBatch) -> tuple[Tensor, Groups]:
    """Rewards [N], and the groups of the samples that have one."""
    rewards = batch.totals()
    return rewards, Groups.of(batch.groups, ~rewards.isnan())


def _centred(groups: Groups, rewards: Tensor, leave_one_out: bool) -> Tensor:
    """float64 [N]: reward minus the mean of its group, or of the others of its group."""
    centred = rewards.double() - groups.mean(rewards)[groups.member]
    if leave_one_out:  # r - mean of the others = (r - mean) n / (n - 1)
        sizes = groups.sizes[groups.member]
        centred = centred * sizes / (sizes - 1).clamp(min=1)
    return torch.where(groups.uniform(rewards)[groups.member], 0.0, centred)


def _with_lone(
    groups: Groups, rewards: Tensor, centred: Tensor, lone: str, divisor: float = 1.0
) -> Tensor:
    """centred [N] with reward / divisor ("reward") or 0 ("zero") where the sample is alone."""
    fallback = rewards.double() / divisor if lone == "reward" else torch.zeros_like(centred)
    return torch.where(groups.alone(), fallback, centred)


def _per_sample(batch: AdvantageBatch, groups: Groups, per_row: Tensor) -> Advantages:
    advantages = batch.at_tokens(torch.where(groups.present, per_row, 0.0))
    return Advantages(advantages=advantages, returns=advantages)


def _token_whitened(batch: AdvantageBatch, per_row: Tensor, present: Tensor) -> Advantages:
    """Whitened over all tokens, from one number per sample: a sample counts once per token."""
    white = whitened(torch.where(present, per_row, 0.0), batch.tokens())
    advantages = batch.at_tokens(white)
    return Advantages(advantages=advantages, returns=advantages)
