"""The critic's loss."""

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
    """1/2 max((V - R)^2, (V_clipped - R)^2), V_clipped within `clip` of the old value; aggregated.

    values, returns, old_values: [T]. clip = none is the plain squared error. PPO2, arXiv:1707.06347.
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
