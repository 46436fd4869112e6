"""The critic's loss, from the values of tokens to one number."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.algorithms.aggregation import Normaliser, aggregate
from engines.algorithms.jagged import Rows
from engines.algorithms.metric_sums import MetricSums, mean_over


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
