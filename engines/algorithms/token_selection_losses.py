"""Policy losses that treat some tokens apart, chosen over the whole mini-batch.

Clip-Cov and KL-Cov hold back the tokens whose advantage and log-prob move together the most ("The
Entropy Mechanism of RL", arXiv:2505.22617); M2PO leaves out those that moved the furthest
("Prosperity before Collapse", arXiv:2510.01161). Each has a `select_*`, which is given the mini-batch
of all ranks and whose answer comes back as PolicyBatch.selected. Without it a loss chooses within its
micro-batch, as verl does. r = pi / pi_old, A the advantage, T tokens; means are over the tokens with
mask 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engines.algorithms.aggregation import MetricSums, masked_mean, mean_over
from engines.algorithms.inputs import PolicyBatch, TokenLoss, ratio_metrics
from engines.algorithms.token_losses import clip_sides, clipped_surrogate


def covariance(batch: PolicyBatch) -> Tensor:
    """(A - mean A)(log pi - mean log pi), per token [T], means over the tokens with mask 1."""
    advantages, logprobs = batch.signal(), batch.under_mask(batch.logprobs.detach())
    mean_advantage, mean_logprob = (masked_mean(x, batch.mask) for x in (advantages, logprobs))
    return (advantages - mean_advantage) * (logprobs - mean_logprob)


def select_clip_cov(
    batch: PolicyBatch,
    *,
    clip_low: float,
    clip_high: float,
    ratio: float,
    lower: float,
    upper: float,
) -> Tensor:
    """max(ratio T, 1) tokens at random of those with lower < covariance < upper.

    Tokens that the ratio's clip holds back already are no candidates. The choice is drawn from a
    generator that the candidates seed, so that every rank, and a replay, makes the same.

    Args:
        batch: the mini-batch of all ranks.
        clip_low: the ratio's clip, as in `clip_cov`.
        clip_high: likewise.
        ratio: share of the T tokens with mask 1.
        lower: bound on the covariance, in nats (advantages have no unit).
        upper: likewise.

    Returns:
        bool [T].
    """
    candidates = _clip_candidates(batch, clip_low, clip_high, lower, upper)
    allowed = max(int(ratio * int(batch.mask.sum())), 1)
    if int(candidates.sum()) <= allowed:
        return candidates
    places = candidates.nonzero().squeeze(-1)
    generator = torch.Generator().manual_seed(int(places.sum()))
    drawn = torch.randperm(places.numel(), generator=generator)[:allowed].to(places.device)
    chosen = torch.zeros_like(candidates)
    chosen[places[drawn]] = True
    return chosen


def _clip_candidates(
    batch: PolicyBatch, clip_low: float, clip_high: float, lower: float, upper: float
) -> Tensor:
    moves_together, pi_ratio = covariance(batch), batch.log_ratio(bound=None).detach().exp()
    held_low, held_high = clip_sides(batch.signal(), pi_ratio, 1 - clip_low, 1 + clip_high)
    within = (moves_together > lower) & (moves_together < upper)
    return batch.mask & ~held_low & ~held_high & within


def clip_cov(
    batch: PolicyBatch,
    *,
    clip_low: float,
    clip_high: float,
    ratio: float,
    lower: float,
    upper: float,
) -> TokenLoss:
    """PPO's clipped loss with the chosen tokens left out: l = 0 there.

    l = max(-A r, -A clip(r, 1 - low, 1 + high)); log r is not bounded.

    Args:
        batch: a micro-batch.
        clip_low: the ratio is clipped below 1 - clip_low.
        clip_high: the ratio is clipped above 1 + clip_high.
        ratio: as in `select_clip_cov`.
        lower: as there.
        upper: as there.

    Returns:
        Loss [T] and metrics; covariance_share: of the tokens that were left out.
    """
    chosen = batch.selected
    if chosen is None:
        chosen = select_clip_cov(
            batch,
            clip_low=clip_low,
            clip_high=clip_high,
            ratio=ratio,
            lower=lower,
            upper=upper,
        )
    log_ratio = batch.log_ratio(bound=None)
    base = clipped_surrogate(batch, log_ratio, clip_low=clip_low, clip_high=clip_high)
    return TokenLoss(
        values=torch.where(chosen, 0.0, base.values),
        metrics=base.metrics
        + MetricSums(means={"covariance_share": mean_over(chosen, batch.mask)}),
    )


def select_kl_cov(batch: PolicyBatch, *, ratio: float, coefficient: float) -> Tensor:
    """The max(ratio T, 1) tokens with the largest covariance: bool [T].

    Args:
        batch: the mini-batch of all ranks.
        ratio: share of the T tokens with mask 1.
        coefficient: of the loss; has no part in the choice.
    """
    total = int(batch.mask.sum())
    chosen = torch.zeros_like(batch.mask)
    if total:
        largest = torch.where(batch.mask, covariance(batch), float("-inf"))
        chosen[largest.topk(max(int(total * ratio), 1)).indices] = True
    return chosen


def kl_cov(batch: PolicyBatch, *, ratio: float, coefficient: float) -> TokenLoss:
    """The unclipped loss, with a penalty on the change of the chosen tokens.

    l = -A r + [chosen] coefficient |log r|; log r is not bounded.

    Args:
        batch: a micro-batch.
        ratio: as in `select_kl_cov`.
        coefficient: weight of the penalty, per nat.

    Returns:
        Loss [T] and metrics; covariance_share: of the tokens that were chosen; log_ratio_abs: the
        mean |log r|, in nats.
    """
    chosen = batch.selected
    if chosen is None:
        chosen = select_kl_cov(batch, ratio=ratio, coefficient=coefficient)
    log_ratio = batch.log_ratio(bound=None)
    penalty = torch.where(chosen, coefficient * log_ratio.abs(), 0.0)
    return TokenLoss(
        values=-batch.signal() * log_ratio.exp() + penalty,
        metrics=ratio_metrics(
            batch, log_ratio, covariance_share=chosen, log_ratio_abs=log_ratio.abs()
        ),
    )


def select_m2po(batch: PolicyBatch, *, threshold: float) -> Tensor:
    """The tokens that M2PO leaves out: bool [T].

    Among the tokens that push against the trust region (A > 0 and r > 1, or A < 0 and r < 1), those
    with the largest (log r)^2 are left out, as few as bring the mean of the rest to the threshold.

    Args:
        batch: the mini-batch of all ranks.
        threshold: bound on the mean of (log r)^2 over the pushing tokens that stay, in nats^2.
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
    """M2PO: l = -A r, left out (0) at the tokens of `select_m2po`. arXiv:2510.01161.

    r is the ratio to PolicyBatch.old_logprobs; with algorithm.ratio_against = rollout_logprobs it is
    the ratio to the behaviour policy, as in the paper.

    Args:
        batch: a micro-batch.
        threshold: as in `select_m2po`.

    Returns:
        Loss [T] and metrics; clip_share: of the tokens that were left out; second_moment: the mean
        (log r)^2 over all tokens, in nats^2.
    """
    chosen = batch.selected
    if chosen is None:
        chosen = select_m2po(batch, threshold=threshold)
    log_ratio = batch.log_ratio()
    values = -batch.signal() * log_ratio.exp()
    return TokenLoss(
        values=torch.where(chosen, 0.0, values),
        metrics=ratio_metrics(
            batch, log_ratio, clip_share=chosen, second_moment=log_ratio.square()
        ),
    )
