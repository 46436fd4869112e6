"""Policy losses by name, how each is called and what it needs; and the critic's loss.

A method maps a micro-batch to the loss of every token (`loss(batch, **params) -> TokenLoss`); what
becomes of the tokens is in aggregation.py, the sum of all terms in objective.py. The methods:
token_losses.py (one ratio per token), sequence_losses.py (one per row), token_selection_losses.py
(tokens chosen over the whole mini-batch). The critic's loss, `value_loss`, is one number already.

A new method is one function and one line in POLICY_LOSSES, or a user's import path to either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.algorithms.aggregation import MetricSums, Normaliser, aggregate, mean_over
from engines.algorithms.inputs import TokenLoss
from engines.algorithms.jagged import Rows
from engines.algorithms.sequence_losses import geo_mean, gspo, luspo, vespo
from engines.algorithms.token_losses import (
    cispo,
    clipped,
    cpgd,
    decoupled,
    dppo_kl,
    dppo_tv,
    dro,
    reinforce,
    sapo,
)
from engines.algorithms.token_selection_losses import (
    clip_cov,
    kl_cov,
    m2po,
    select_clip_cov,
    select_kl_cov,
    select_m2po,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """A method: how to call it and what it needs."""

    loss: Callable[..., TokenLoss]  # loss(batch, **params) -> TokenLoss
    aggregation: str | None = None  # the only aggregation that the method has; None: any
    needs: tuple[str, ...] = ()  # columns of PolicyBatch beyond logprobs, advantages, old_logprobs
    # select(mini_batch, **params) -> bool [T]: for methods whose choice of tokens is made over the
    # whole mini-batch; its result is handed to the loss as PolicyBatch.selected.
    select: Callable[..., Tensor] | None = None
    ratio: bool = True  # pi / pi_old is in the loss: against the rollout policy, it corrects itself
    own_weights: bool = False  # the method applies PolicyBatch.weights itself


POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "clipped": PolicyLoss(loss=clipped),
    "gspo": PolicyLoss(loss=gspo),
    "cispo": PolicyLoss(loss=cispo),
    "sapo": PolicyLoss(loss=sapo, aggregation="seq-mean-token-mean"),
    "gmpo": PolicyLoss(loss=geo_mean, aggregation="row-mean-token-mean", own_weights=True),
    "luspo": PolicyLoss(loss=luspo, aggregation="row-mean-token-sum"),
    "vespo": PolicyLoss(loss=vespo, own_weights=True),
    "clip_cov": PolicyLoss(loss=clip_cov, select=select_clip_cov),
    "kl_cov": PolicyLoss(loss=kl_cov, select=select_kl_cov),
    "dppo_tv": PolicyLoss(loss=dppo_tv),
    "dppo_kl": PolicyLoss(loss=dppo_kl),
    "dro": PolicyLoss(loss=dro),
    "cpgd": PolicyLoss(loss=cpgd),
    "m2po": PolicyLoss(loss=m2po, select=select_m2po),
    "decoupled": PolicyLoss(loss=decoupled, needs=("rollout_logprobs",)),
    "gpg": PolicyLoss(loss=reinforce, ratio=False),
    "reinforce": PolicyLoss(loss=reinforce, ratio=False),
}


def value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor,
    mask: Tensor,
    rows: Rows,
    normaliser: Normaliser,
    *,
    clip: float | None,
    aggregation: str,
) -> tuple[Tensor, MetricSums]:
    """1/2 max((V - R)^2, (V_clipped - R)^2), V_clipped = clip(V, V_old - clip, V_old + clip).

    PPO's, as in its reference implementation; arXiv:1707.06347.

    Args:
        values: V [T] of the critic that trains, in units of reward, with gradient.
        returns: R [T], its targets.
        old_values: V_old [T] of the critic before the update.
        mask: bool [T]; what stands under False is never used.
        rows: N rows, T tokens.
        normaliser: the counts of the mini-batch.
        clip: bound on a value's change, in units of reward; None: the plain squared error.
        aggregation: a mode of `aggregate`.

    Returns:
        The loss (scalar with gradient), and as metrics the loss and means over the tokens with mask
        1: value_clip_share (the clipped term is the larger), value_error (V - R)^2, value_mean,
        return_mean.
    """
    values, returns, old_values = (
        torch.where(mask, x, 0.0) for x in (values, returns.detach(), old_values.detach())
    )
    plain = (values - returns).square()
    squares, clipped = plain, plain
    if clip is not None:
        bounded = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
        clipped = (bounded - returns).square()
        squares = torch.maximum(plain, clipped)
    loss = aggregate(0.5 * squares, mask, rows, normaliser, aggregation)
    metrics = MetricSums(
        means={
            "value_clip_share": mean_over(clipped > plain, mask),
            "value_error": mean_over(plain, mask),
            "value_mean": mean_over(values, mask),
            "return_mean": mean_over(returns, mask),
        },
        sums={"value_loss": loss.detach() / normaliser.ranks},
    )
    return loss, metrics
