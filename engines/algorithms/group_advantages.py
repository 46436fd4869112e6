"""Advantages from one reward per sample, compared within its group. r is the reward, g the group.

Each takes an AdvantageBatch of N samples and T tokens and answers Advantages [T]: every token of a
sample gets the sample's advantage, masked ones 0; returns are the same numbers. Means and deviations
are over samples, with the divisors n and n - 1, where not said otherwise. `lone` says what a group of
one gets: "reward" (its reward as it is, as in verl) or "zero". A sample without a reward (NaN) counts
nowhere and gets 0. epsilon is added to a deviation, in units of reward.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engines.algorithms.groups import Groups, whitened
from engines.algorithms.inputs import AdvantageBatch, Advantages
from engines.algorithms.jagged import divide


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
    own = rewards.double() / divisor if lone == "reward" else torch.zeros_like(centred)
    return torch.where(groups.alone(), own, centred)


def _per_sample(batch: AdvantageBatch, groups: Groups, per_row: Tensor) -> Advantages:
    advantages = batch.at_tokens(torch.where(groups.present, per_row, 0.0))
    return Advantages(advantages=advantages, returns=advantages)


def _token_whitened(batch: AdvantageBatch, per_row: Tensor, present: Tensor) -> Advantages:
    """Whitened over all tokens, from one number per sample: a sample counts once per token."""
    white = whitened(torch.where(present, per_row, 0.0), batch.tokens())
    advantages = batch.at_tokens(white)
    return Advantages(advantages=advantages, returns=advantages)
