"""A policy loss of your own: a pure function of a micro-batch.

    algorithm.loss.kind=function algorithm.loss.path=loss.py:quadratic

The train workers import this file, the flow's process does not.
"""

from __future__ import annotations

from engines.algorithms.inputs import PolicyBatch, TokenLoss, ratio_metrics


def quadratic(batch: PolicyBatch, *, coefficient: float = 0.1) -> TokenLoss:
    """l_t = -A_t r_t + coefficient (log r_t)^2: a slope that grows with the ratio instead of a clip.

    Args:
        batch: T tokens; only its logprobs carry a gradient.
        coefficient: weight of the penalty, per nat^2; from algorithm.loss.params.
    """
    log_ratio = batch.log_ratio()  # [T] in nats, 0 where masked
    penalty = coefficient * log_ratio.square()
    metrics = ratio_metrics(batch, log_ratio, penalty=penalty.detach())
    return TokenLoss(values=penalty - batch.signal() * log_ratio.exp(), metrics=metrics)
