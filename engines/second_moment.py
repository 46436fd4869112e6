"""M2PO: stale samples stay in until the second moment of the log ratio is within a bound."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.policy_batch import PolicyBatch, TokenLoss, ratio_metrics


def select_m2po(batch: PolicyBatch, *, threshold: float) -> Tensor:
    """bool [T]: the tokens that M2PO leaves out, chosen over the whole mini-batch.

    Among the tokens that push against the trust region (A > 0 and r > 1, or A < 0 and r < 1), those
    with the largest (log r)^2 are left out, as few as bring the mean of the rest to the threshold.
    """
    log_ratio, advantages = batch.log_ratio().detach(), batch.signal()
    pushing = batch.mask & (advantages * log_ratio > 0)
    moments = torch.where(pushing, log_ratio.double().square(), 0.0)
    ordered, order = moments.sort(descending=True)  # the other tokens follow, with moment 0
    count = int(pushing.sum())
    if count == 0:
        return pushing
    ordered = ordered[:count]
    rest = ordered.flip(0).cumsum(0).flip(0)
    left = torch.arange(count, 0, -1, device=rest.device)
    too_much = rest / left > threshold  # holds for a prefix: the mean of the rest decreases
    chosen = torch.zeros_like(pushing)
    chosen[order[:count][too_much]] = True
    return chosen & pushing


def m2po(batch: PolicyBatch, *, threshold: float) -> TokenLoss:
    """M2PO: l = -A r, left out (0) at the tokens of `select_m2po`.

    "Prosperity before Collapse", arXiv:2510.01161. r is the ratio to PolicyBatch.old_logprobs; with
    algorithm.ratio_against = rollout_logprobs it is the ratio to the behaviour policy, as there.
    """
    chosen = (
        batch.selected if batch.selected is not None else select_m2po(batch, threshold=threshold)
    )
    log_ratio = batch.log_ratio()
    values = -batch.signal() * log_ratio.exp()
    return TokenLoss(
        values=torch.where(chosen, 0.0, values),
        metrics=ratio_metrics(
            batch, log_ratio, clip_share=chosen, second_moment=log_ratio.square()
        ),
    )
