"""Advantages from one reward per sample, compared within its group. r is the reward, g the group.

Every token of a sample gets the sample's advantage. `lone` says what a group of one gets: "reward"
(its reward as it is, as in verl) or "zero". A sample without a reward (NaN) counts nowhere, gets 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engines.algorithms.groups import Groups
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

    GRPO, arXiv:2402.03300. std has the divisor n - 1. baseline and normalize: over the "group", the
    "batch", or "none". leave_one_out takes the mean over the others only.
    """
    rewards = batch.totals()
    groups = Groups.of(batch.groups, ~rewards.isnan())
    whole = Groups.of(torch.zeros_like(batch.groups), groups.present)
    level = {"group": groups, "batch": whole}
    centred, alone = rewards.double(), groups.alone()
    if baseline != "none":
        centred = _centred(level[baseline], rewards, leave_one_out)
        alone = level[baseline].alone()
    if normalize != "none":
        deviation = level[normalize].deviation(rewards)[level[normalize].member]
        deviation = torch.where(level[normalize].alone(), 1.0, deviation)
        centred = divide(centred, deviation + epsilon)
    if baseline != "none":
        own = rewards.double() if lone == "reward" else torch.zeros_like(centred)
        if normalize != "none":
            own = own / (1.0 + epsilon)
        centred = torch.where(alone, own, centred)
    return _per_sample(batch, groups, centred)


def dr_grpo(batch: AdvantageBatch, *, lone: str) -> Advantages:
    """Dr. GRPO: A_i = r_i - mean(r_g), without the division that favours easy and hard prompts.

    arXiv:2503.20783. Its loss is aggregated by seq-mean-token-sum-norm.
    """
    return grpo(
        batch, baseline="group", leave_one_out=False, normalize="none", epsilon=0.0, lone=lone
    )


def rloo(batch: AdvantageBatch, *, lone: str) -> Advantages:
    """REINFORCE leave-one-out: A_i = r_i - mean of the other rewards of g. arXiv:2402.14740."""
    return grpo(
        batch, baseline="group", leave_one_out=True, normalize="none", epsilon=0.0, lone=lone
    )


def grpo_passk(batch: AdvantageBatch, *, normalize: bool, epsilon: float) -> Advantages:
    """Pass@k: only a group's best sample gets an advantage, its lead over the second best.

    A = (r_(1) - r_(2)) / (std(r_g) + epsilon) for the best, 0 for the others and for a group of
    one. arXiv:2503.19595.
    """
    rewards = batch.totals()
    groups = Groups.of(batch.groups, ~rewards.isnan())
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

    A_i = r_i - sum_g |y| r / sum_g |y|. arXiv:2505.23585. A group without tokens gets 0.
    """
    rewards = batch.totals()
    groups = Groups.of(batch.groups, ~rewards.isnan())
    lengths = batch.rows.tokens(batch.mask, torch.float64)
    total = groups.sum(lengths)
    weighted = groups.sum(lengths * rewards.double())
    baseline = torch.where(total > 0, weighted / total.clamp(min=1), 0.0)[groups.member]
    own = rewards.double() if lone == "reward" else torch.zeros_like(baseline)
    return _per_sample(batch, groups, torch.where(groups.alone(), own, rewards.double() - baseline))


def gpg(batch: AdvantageBatch, *, scale: float, lone: str) -> Advantages:
    """GPG: A_i = alpha (r_i - mean(r_g)) / scale, alpha = samples / samples with non-zero reward.

    arXiv:2504.02546.
    """
    rewards = batch.totals()
    groups = Groups.of(batch.groups, ~rewards.isnan())
    nonzero = (groups.present & (rewards != 0)).sum().clamp(min=1)
    alpha = groups.present.sum() / nonzero.double()
    centred = _centred(groups, rewards, leave_one_out=False)
    own = rewards.double() if lone == "reward" else torch.zeros_like(centred)
    centred = torch.where(groups.alone(), own, centred)
    return _per_sample(batch, groups, alpha * centred / scale)


def maxrl(batch: AdvantageBatch, *, epsilon: float) -> Advantages:
    """MaxRL: A_i = (r_i - mean(r_g)) / (mean(r_g) + epsilon); 0 where the mean is not positive.

    The gradient of the log-likelihood of success instead of its probability. For rewards >= 0.
    arXiv:2602.02710.
    """
    rewards = batch.totals()
    groups = Groups.of(batch.groups, ~rewards.isnan())
    mean = groups.mean(rewards)[groups.member]
    ratio = divide(rewards.double() - mean, mean.clamp(min=0) + epsilon)
    return _per_sample(batch, groups, torch.where(mean > 0, ratio, 0.0))


def cpgd(batch: AdvantageBatch, *, weight: str, cap: float, epsilon: float) -> Advantages:
    """CPGD's weighted advantage: A_i = w (r_i - mean(r_g)).

    w = 1 ("equal"), 1 / (std(r_g) + epsilon) ("std"), or min(cap, samples / samples whose group has
    variance) ("filter": as if groups without variance had been replaced). arXiv:2505.12504.
    """
    rewards = batch.totals()
    groups = Groups.of(batch.groups, ~rewards.isnan())
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

    The whitening counts a sample once per token, so long answers weigh more. arXiv:2501.03262.
    """
    rewards = batch.totals()
    groups = Groups.of(batch.groups, ~rewards.isnan())
    centred = _centred(groups, rewards, leave_one_out=False)
    own = rewards.double() if lone == "reward" else torch.zeros_like(centred)
    return _token_whitened(batch, torch.where(groups.alone(), own, centred), groups.present)


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
    """
    parts = dict(batch.components) or {"reward": batch.totals()}
    total, present = torch.zeros_like(batch.rewards, dtype=torch.float64), None
    for name, component in parts.items():
        groups = Groups.of(batch.groups, ~component.isnan())
        centred = _centred(groups, component, leave_one_out=False)
        if normalize:
            centred = divide(centred, groups.deviation(component)[groups.member] + epsilon)
        if lone == "reward":
            own = component.double() / (1.0 + epsilon if normalize else 1.0)
            centred = torch.where(groups.alone(), own, centred)
        total = total + weights.get(name, 1.0) * torch.where(groups.present, centred, 0.0)
        present = groups.present if present is None else present | groups.present
    assert present is not None
    if over == "samples":
        whole = Groups.of(torch.zeros_like(batch.groups), present)
        deviation = whole.deviation(total)[whole.member]
        mean = whole.mean(total)[whole.member]
        return _per_sample(batch, whole, divide(total - mean, deviation + epsilon))
    return _token_whitened(batch, total, present)


def _centred(groups: Groups, rewards: Tensor, leave_one_out: bool) -> Tensor:
    """float64 [N]: reward minus the mean of its group, or of the others of its group."""
    centred = rewards.double() - groups.mean(rewards)[groups.member]
    if leave_one_out:  # r - mean of the others = (r - mean) n / (n - 1)
        sizes = groups.sizes[groups.member]
        centred = centred * sizes / (sizes - 1).clamp(min=1)
    return torch.where(groups.uniform(rewards)[groups.member], 0.0, centred)


def _per_sample(batch: AdvantageBatch, groups: Groups, per_row: Tensor) -> Advantages:
    advantages = batch.at_tokens(torch.where(groups.present, per_row, 0.0))
    return Advantages(advantages=advantages, returns=advantages)


def _token_whitened(batch: AdvantageBatch, per_row: Tensor, present: Tensor) -> Advantages:
    """Whitened over all tokens, from one number per sample: a sample counts once per token."""
    per_row = torch.where(present, per_row, 0.0)
    tokens = batch.rows.tokens(batch.mask, torch.float64)
    count = tokens.sum()
    centred = per_row - divide((tokens * per_row).sum(), count)
    variance = (tokens * centred.square()).sum() / (count - 1).clamp(min=1)
    advantages = batch.at_tokens(centred * torch.rsqrt(variance + 1e-8))
    return Advantages(advantages=advantages, returns=advantages)
