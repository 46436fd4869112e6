"""Advantages that differ from token to token.

With a critic (gae), with discounting (reinforce, reinforce_plus_plus), against a greedy completion
(remax), with turns (gigpo), against a baseline for each position (the optimal token baselines).

Each takes an AdvantageBatch of N samples and T tokens and answers Advantages [T], 0 where masked.
Tokens with mask 0 (tool output) are skipped: they neither receive a return nor discount it. Whitening
is over the tokens with mask 1, with the divisors n and n - 1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.algorithms.aggregation import Rows, cumulative_sums, discounted_sums, divide
from engines.algorithms.group_advantages import Groups, grpo, whitened_rows
from engines.algorithms.inputs import AdvantageBatch, Advantages


def gae(batch: AdvantageBatch, *, gamma: float, lam: float, whiten: bool) -> Advantages:
    """Generalised advantage estimation: A_t = sum_j (gamma lam)^j delta_{t+j}.

    delta_t = r_t + gamma V_{t+1} - V_t, V = 0 after the last token; returns = A + V before
    whitening. arXiv:1506.02438.

    Args:
        batch: N samples, with the critic's values.
        gamma: discount per token.
        lam: lambda, the weight of longer estimates, per token.
        whiten: scale A to mean 0 and variance 1 over the tokens.
    """
    assert batch.values is not None, "gae needs the critic's values"
    tokens = batch.rows.kept(batch.mask)
    values = tokens.take(batch.values)
    delta = batch.dense_kept(tokens) - values
    delta[:-1] += gamma * _inside(values[1:], tokens.rows)
    advantages = discounted_sums(delta, tokens.rows, gamma * lam)
    returns = advantages + values
    if whiten:
        advantages = whitened_rows(advantages, tokens.rows, batch.moments)
    return Advantages(advantages=tokens.put(advantages), returns=tokens.put(returns))


def reinforce_plus_plus(batch: AdvantageBatch, *, gamma: float) -> Advantages:
    """REINFORCE++: discounted returns, whitened over all tokens. arXiv:2501.03262.

    R_t = r_t + gamma R_{t+1}; A = whiten(R).

    Args:
        batch: N samples.
        gamma: discount per token.
    """
    tokens = batch.rows.kept(batch.mask)
    returns = discounted_sums(batch.dense_kept(tokens), tokens.rows, gamma)
    advantages = whitened_rows(returns, tokens.rows, batch.moments)
    return Advantages(advantages=tokens.put(advantages), returns=tokens.put(returns))


def reinforce(batch: AdvantageBatch, *, gamma: float) -> Advantages:
    """No baseline: A_t = R_t = r_t + gamma R_{t+1}. Williams 1992, doi:10.1007/BF00992696.

    Args:
        batch: N samples.
        gamma: discount per token.
    """
    tokens = batch.rows.kept(batch.mask)
    returns = tokens.put(discounted_sums(batch.dense_kept(tokens), tokens.rows, gamma))
    return Advantages(advantages=returns, returns=returns)


def remax(batch: AdvantageBatch) -> Advantages:
    """ReMax: A_t = R_t - b, b the reward of the greedy completion of the prompt, R_t undiscounted.

    arXiv:2310.10505.

    Args:
        batch: N samples, with baselines.
    """
    assert batch.baselines is not None, "remax needs baselines"
    returns = rewards_to_go(batch)
    advantages = torch.where(batch.mask, returns - batch.rows.spread(batch.baselines), 0.0)
    return Advantages(advantages=advantages, returns=returns)


def gigpo(
    batch: AdvantageBatch,
    *,
    gamma: float,
    step_weight: float,
    normalize: bool,
    epsilon: float,
    among: str,
) -> Advantages:
    """GiGPO: the advantage of the episode in its group plus that of the turn among equal states.

    A = A_E + w A_S. A_E: GRPO's advantage of the sample. A_S: GRPO's advantage of the turn's
    discounted return R_k = sum_j gamma^j r_{k+j} (r_k the sum of the turn's token rewards), among
    the turns that began in the same state; 0 for a state that was met once. A turn is the run of a
    row's tokens (mask 1) with the same number. arXiv:2505.10978.

    Args:
        batch: N samples, with steps and states.
        gamma: discount per turn.
        step_weight: w.
        normalize: divide by the standard deviations (of samples, of turns; divisor n - 1).
        epsilon: added to them.
        among: whose turns are compared: "group", of the prompt's samples; "batch", of all.
    """
    episode = _within_groups(normalize, epsilon)(batch, lone="reward").advantages
    tokens = batch.rows.kept(batch.mask)
    turns = turns_of(batch, gamma)
    per_turn = batch.turn_advantages
    if per_turn is None:
        same = turns.states
        if among == "group":
            state = torch.unique(turns.states, return_inverse=True)[1]
            same = Groups.of(batch.groups).member[turns.row] * (state.numel() + 1) + state
        per_turn = among_turns(turns.returns, same, normalize, epsilon)
    total = episode + step_weight * tokens.put(turns.rows.spread(per_turn))
    return Advantages(advantages=total, returns=total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """The K turns of a batch, in the order of its rows.

    Two samples of two turns and one, the first with the rewards 1 and 0, gamma 0.5, the second with
    the reward 3: returns [1, 0, 3], row [0, 0, 1].
    """

    rows: Rows  # K turns, of the tokens with mask 1
    returns: Tensor  # [K], discounted from the turn to the end of its row
    states: Tensor  # int64 [K], in which they began
    row: Tensor  # int64 [K], the sample of each, ascending
    samples: Rows  # N samples, K turns


def turns_of(batch: AdvantageBatch, gamma: float) -> Turns:
    """The turns of N samples; a row without a token of mask 1 has none.

    Args:
        batch: N samples, with steps and states.
        gamma: discount per turn.
    """
    assert batch.steps is not None and batch.states is not None, "gigpo needs steps and states"
    tokens = batch.rows.kept(batch.mask)
    rows, steps = tokens.rows, tokens.take(batch.steps)
    begins = torch.ones_like(steps, dtype=torch.bool)
    begins[1:] = (steps[1:] != steps[:-1]) | (rows.ids[1:] != rows.ids[:-1])
    first = begins.nonzero().squeeze(-1)
    turns = Rows.of_offsets(torch.cat([first, first.new_full((1,), steps.numel())]))
    row = rows.ids[first]
    samples = Rows.of_lengths(torch.bincount(row, minlength=rows.count))
    return Turns(
        rows=turns,
        returns=discounted_sums(turns.sum(batch.dense_kept(tokens)), samples, gamma),
        states=tokens.take(batch.states)[first],
        row=row,
        samples=samples,
    )


def among_turns(returns: Tensor, states: Tensor, normalize: bool, epsilon: float) -> Tensor:
    """GRPO's advantage of each turn among those of one state [K]; 0 for a state that was met once.

    Args:
        returns: [K].
        states: int64 [K], equal where turns are compared.
        normalize: divide by the state's standard deviation (divisor n - 1).
        epsilon: added to it.
    """
    ones = torch.ones_like(states)  # a token stands for each turn
    turns = AdvantageBatch(
        rows=Rows.of_lengths(ones), mask=ones.bool(), rewards=returns, groups=states
    )
    return _within_groups(normalize, epsilon)(turns, lone="zero").advantages


def _within_groups(normalize: bool, epsilon: float) -> Callable[..., Advantages]:
    """GRPO within groups, as GiGPO takes it of samples and of turns."""
    kind = "group" if normalize else "none"
    return functools.partial(
        grpo, baseline="group", leave_one_out=False, normalize=kind, epsilon=epsilon
    )


def rewards_to_go(batch: AdvantageBatch) -> Tensor:
    """Sum of the rewards from each token on [T]; token rewards: at masked tokens too."""
    if batch.token_rewards is None:
        return batch.at_tokens(batch.rewards)
    return discounted_sums(batch.dense(), batch.rows, 1.0)


def _inside(following: Tensor, rows: Rows) -> Tensor:
    """following [T - 1], the value after each token but the last; 0 where that is another row's."""
    following = following.clone()
    last = rows.ends()[1]
    following[last[last < following.numel()]] = 0.0
    return following


def optimal_token_baseline(batch: AdvantageBatch, *, zero_tail: bool, epsilon: float) -> Advantages:
    """A_t = R_t - B_t with B_t = sum_g R_t W_t / (sum_g W_t + epsilon) at the same position t.

    W_t = sum_{j<=t} (1 - 2 pi_j + sum_v pi_j(v)^2) rho_j^2, rho the correction weight (or 1): the
    squared norm of the gradient of the path so far. A group of one has B = 0; with zero_tail so has
    the part of the longest response beyond the second longest. arXiv:2602.07078.
    Positions count all tokens of the response; with tool output inside, use the multi-turn form.

    Args:
        batch: N samples, with logprobs and sum_pi_squared, and correction_weights if there are.
        zero_tail: no baseline where only one response of the group is so long.
        epsilon: added to the weights' sum.
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

    Args:
        batch: as for optimal_token_baseline.
        zero_tail: as there.
        epsilon: as there.
    """
    returns = rewards_to_go(batch)
    groups = Groups.of(batch.groups, batch.rows.tokens(batch.mask) > 0)
    tokens = batch.rows.kept(batch.mask)
    weights = batch.correction_weights
    packed = dataclasses.replace(
        batch,
        rows=tokens.rows,
        mask=tokens.take(batch.mask),
        logprobs=None if batch.logprobs is None else tokens.take(batch.logprobs),
        sum_pi_squared=None if batch.sum_pi_squared is None else tokens.take(batch.sum_pi_squared),
        correction_weights=None if weights is None else tokens.take(weights),
    )
    values = tokens.take(returns)
    baseline = _baseline(packed, groups, values, zero_tail, epsilon)
    return Advantages(advantages=tokens.put(values - baseline), returns=returns)


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
