"""The optimal token baseline: one for each position, weighted by how uncertain the path was."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.advantage_batch import AdvantageBatch, Advantages
from engines.groups import Groups
from engines.jagged import divide
from engines.token_advantages import rewards_to_go


def optimal_token_baseline(batch: AdvantageBatch, *, zero_tail: bool, epsilon: float) -> Advantages:
    """A_t = R_t - B_t with B_t = sum_g R_t W_t / (sum_g W_t + epsilon) at the same position t.

    W_t = sum_{j<=t} (1 - 2 pi_j + sum_v pi_j(v)^2) rho_j^2, rho the correction weight (or 1): the
    squared norm of the gradient of the path so far. A group of one has B = 0; with zero_tail so has
    the part of the longest response beyond the second longest. arXiv:2602.07078.
    Positions count all tokens of the response; with tool output inside, use the multi-turn form.
    """
    return _baselined(batch, Groups.of(batch.groups), batch.rows.within(), zero_tail, epsilon)


def multi_turn_optimal_token_baseline(
    batch: AdvantageBatch, *, zero_tail: bool, epsilon: float
) -> Advantages:
    """As optimal_token_baseline, with positions that count only the tokens with mask 1.

    An empty response is no member of its group.
    """
    inner = batch.rows.cumulative(batch.mask.to(batch.rewards.dtype)).long() - 1
    groups = Groups.of(batch.groups, batch.rows.tokens(batch.mask) > 0)
    return _baselined(batch, groups, inner.clamp(min=0), zero_tail, epsilon)


def _baselined(
    batch: AdvantageBatch, groups: Groups, position: Tensor, zero_tail: bool, epsilon: float
) -> Advantages:
    returns = rewards_to_go(batch)
    weight = torch.where(batch.mask, _path_energy(batch), 0.0)
    width = int(position.max()) + 1 if position.numel() else 1
    # One slot for each position of each group.
    slot = (groups.member * width)[batch.rows.ids] + position
    numerator = returns.new_zeros(groups.sizes.numel() * width)
    denominator = torch.zeros_like(numerator)
    numerator.index_add_(0, slot, weight * returns)
    denominator.index_add_(0, slot, weight)
    baseline = divide(numerator, denominator + epsilon)[slot]
    start = _tail_start(groups, batch.rows.tokens(batch.mask, torch.float64), zero_tail)
    baseline = torch.where(position < batch.rows.spread(start), baseline, 0.0)
    return Advantages(advantages=torch.where(batch.mask, returns - baseline, 0.0), returns=returns)


def _path_energy(batch: AdvantageBatch) -> Tensor:
    """W_t [T]."""
    assert batch.logprobs is not None, "the optimal token baseline needs logprobs"
    assert batch.sum_pi_squared is not None, "the optimal token baseline needs sum_pi_squared"
    energy = 1 - 2 * batch.logprobs.where(batch.mask, 0.0).exp() + batch.sum_pi_squared
    if batch.correction_weights is not None:
        energy = energy * batch.correction_weights.square()
    return batch.rows.cumulative(torch.where(batch.mask, energy, 0.0))


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
