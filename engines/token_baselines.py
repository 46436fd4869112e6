"""The optimal token baseline: one for each position, weighted by how uncertain the path was."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from engines.advantage_batch import AdvantageBatch, Advantages
from engines.groups import Groups
from engines.jagged import divide
from engines.scans import cumulative_sums
from engines.token_advantages import rewards_to_go


def optimal_token_baseline(batch: AdvantageBatch, *, zero_tail: bool, epsilon: float) -> Advantages:
    """A_t = R_t - B_t with B_t = sum_g R_t W_t / (sum_g W_t + epsilon) at the same position t.

    W_t = sum_{j<=t} (1 - 2 pi_j + sum_v pi_j(v)^2) rho_j^2, rho the correction weight (or 1): the
    squared norm of the gradient of the path so far. A group of one has B = 0; with zero_tail so has
    the part of the longest response beyond the second longest. arXiv:2602.07078.
    Positions count all tokens of the response; with tool output inside, use the multi-turn form.
    """
    returns = rewards_to_go(batch)
    baseline = _baseline(batch, Groups.of(batch.groups), returns, zero_tail, epsilon)
    advantages = torch.where(batch.mask, returns - baseline, 0.0)
    return Advantages(advantages=advantages, returns=returns)


def multi_turn_optimal_token_baseline(
    batch: AdvantageBatch, *, zero_tail: bool, epsilon: float
) -> Advantages:
    """As optimal_token_baseline, with positions that count only the tokens with mask 1.

    An empty response is no member of its group. arXiv:2602.07078.
    """
    returns = rewards_to_go(batch)
    groups = Groups.of(batch.groups, batch.rows.tokens(batch.mask) > 0)

    kept = batch.rows.kept(batch.mask)
    weights = batch.correction_weights
    packed = dataclasses.replace(
        batch,
        rows=kept.rows,
        mask=kept.take(batch.mask),
        logprobs=None if batch.logprobs is None else kept.take(batch.logprobs),
        sum_pi_squared=None if batch.sum_pi_squared is None else kept.take(batch.sum_pi_squared),
        correction_weights=None if weights is None else kept.take(weights),
    )
    own = kept.take(returns)
    baseline = _baseline(packed, groups, own, zero_tail, epsilon)
    return Advantages(advantages=kept.put(own - baseline), returns=returns)


def _baseline(
    batch: AdvantageBatch, groups: Groups, returns: Tensor, zero_tail: bool, epsilon: float
) -> Tensor:
    """B_t [T]."""
    rows = batch.rows
    weight = cumulative_sums(_energy(batch), rows).mul_(batch.mask)
    width = int(rows.lengths.max()) if rows.count else 0
    # One slot for each position of each group: the row's first, and on from there.
    slots = groups.sizes.numel() * width
    small = torch.int32 if max(slots, rows.ids.numel()) < 2**31 else torch.int64
    first = groups.member * width
    slot = (first - rows.offsets[:-1]).to(small).index_select(0, rows.ids)
    slot += torch.arange(slot.numel(), device=slot.device, dtype=small)
    denominator = returns.new_zeros(slots)
    numerator = torch.zeros_like(denominator).index_add_(0, slot, weight * returns)
    denominator.index_add_(0, slot, weight)
    baseline = divide(numerator, denominator + epsilon).index_select(0, slot)
    start = _tail_start(groups, rows.tokens(batch.mask, torch.float64), zero_tail)
    limit = (first + start.clamp(max=width).long()).to(small)
    return baseline.mul_(slot < limit.index_select(0, rows.ids))


def _energy(batch: AdvantageBatch) -> Tensor:
    """What each token adds to W [T], 0 where masked."""
    assert batch.logprobs is not None, "the optimal token baseline needs logprobs"
    assert batch.sum_pi_squared is not None, "the optimal token baseline needs sum_pi_squared"
    energy = batch.logprobs.exp().mul_(-2).add_(batch.sum_pi_squared).add_(1)
    if batch.correction_weights is not None:
        energy *= batch.correction_weights.square()
    return torch.where(batch.mask, energy, 0.0)


def _tail_start(groups: Groups, lengths: Tensor, zero_tail: bool) -> Tensor:
    """float64 [N]: position from which a row has no baseline; inf where it always has one."""
    start = torch.full_like(lengths, float("inf"))
    if zero_tail:
        longest = groups.largest(lengths)[groups.member]
        is_longest = groups.present & (lengths == longest)
        single = groups.sum(is_longest.double()) == 1
        second = groups.largest(torch.where(is_longest, float("-inf"), lengths))
        start = torch.where(is_longest & single[groups.member], second[groups.member], start)
    return torch.where((groups.sizes < 2)[groups.member], 0.0, start)
