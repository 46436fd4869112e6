"""Advantages that differ from token to token: with a critic, with discounting, with turns.

Tokens with mask 0 (tool output) are skipped: they neither receive a return nor discount it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engines.advantage_batch import AdvantageBatch, Advantages
from engines.group_advantages import grpo
from engines.groups import Groups
from engines.jagged import Rows
from engines.moments import whitened
from engines.scans import discounted_sums


def gae(batch: AdvantageBatch, *, gamma: float, lam: float, whiten: bool) -> Advantages:
    """Generalised advantage estimation: A_t = sum_j (gamma lam)^j delta_{t+j}.

    delta_t = r_t + gamma V_{t+1} - V_t, V = 0 after the last token; returns = A + V before
    whitening. whiten scales A over all tokens to mean 0, variance 1. arXiv:1506.02438.
    """
    assert batch.values is not None, "gae needs the critic's values"
    kept = batch.rows.kept(batch.mask)
    values = kept.take(batch.values)
    delta = batch.dense_kept(kept) - values
    delta[:-1] += gamma * _inside(values[1:], kept.rows)
    advantages = discounted_sums(delta, kept.rows, gamma * lam)
    returns = advantages + values
    if whiten:
        advantages = whitened(advantages)
    return Advantages(advantages=kept.put(advantages), returns=kept.put(returns))


def reinforce_plus_plus(batch: AdvantageBatch, *, gamma: float) -> Advantages:
    """REINFORCE++: discounted returns, whitened over all tokens. arXiv:2501.03262.

    R_t = r_t + gamma R_{t+1}; A = whiten(R).
    """
    kept = batch.rows.kept(batch.mask)
    returns = discounted_sums(batch.dense_kept(kept), kept.rows, gamma)
    return Advantages(advantages=kept.put(whitened(returns)), returns=kept.put(returns))


def reinforce(batch: AdvantageBatch, *, gamma: float) -> Advantages:
    """No baseline: A_t = R_t = r_t + gamma R_{t+1}. Williams 1992, doi:10.1007/BF00992696."""
    kept = batch.rows.kept(batch.mask)
    returns = kept.put(discounted_sums(batch.dense_kept(kept), kept.rows, gamma))
    return Advantages(advantages=returns, returns=returns)


def remax(batch: AdvantageBatch) -> Advantages:
    """ReMax: A_t = R_t - b, b the reward of the greedy completion of the prompt, R_t undiscounted.

    arXiv:2310.10505.
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
    the turns of the group that began in the same state (among = "group"), or of the whole batch
    ("batch"); a turn is the run of a row's tokens (mask 1) with the same number. normalize = false
    divides by nothing; a state that was met once gives 0. arXiv:2505.10978.
    """
    assert batch.steps is not None and batch.states is not None, "gigpo needs steps and states"
    kept = batch.rows.kept(batch.mask)
    rows = kept.rows
    turns, first = _turns(rows, kept.take(batch.steps))
    rewards = turns.sum(batch.dense_kept(kept))
    row = rows.ids[first]
    episode = Rows.of_lengths(torch.bincount(row, minlength=rows.count))
    returns = discounted_sums(rewards, episode, gamma)
    state = torch.unique(torch.masked_select(batch.states, batch.mask)[first], return_inverse=True)[
        1
    ]
    same = state
    if among == "group":
        same = Groups.of(batch.groups).member[row] * (state.numel() + 1) + state
    of_turns = AdvantageBatch(
        rows=turns,
        mask=torch.ones_like(rows.ids, dtype=torch.bool),
        rewards=returns,
        groups=same,
    )
    kind = "group" if normalize else "none"
    options = {"baseline": "group", "leave_one_out": False, "epsilon": epsilon}
    per_turn = grpo(of_turns, normalize=kind, lone="zero", **options)  # type: ignore[arg-type]
    per_episode = grpo(batch, normalize=kind, lone="reward", **options)  # type: ignore[arg-type]
    total = per_episode.advantages + step_weight * kept.put(per_turn.advantages)
    return Advantages(advantages=total, returns=total)


def _turns(rows: Rows, steps: Tensor) -> tuple[Rows, Tensor]:
    """The turns as rows of their own, and the position of the first token of each [turns]."""
    begins = torch.ones_like(steps, dtype=torch.bool)
    begins[1:] = (steps[1:] != steps[:-1]) | (rows.ids[1:] != rows.ids[:-1])
    first = begins.nonzero().squeeze(-1)
    return Rows.of_offsets(torch.cat([first, first.new_full((1,), steps.numel())])), first


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
