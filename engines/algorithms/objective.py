"""The number to call backward on: policy loss + KL + entropy of one micro-batch.

Built once from a recipe (from_config.objective_of); it holds functions and numbers only. What the
terms are is in losses.py, kl.py and rollout_correction.py; here they are put together, and the
proximal policy's log-probs are interpolated (`loglinear`). The critic has no part in it
(losses.value_loss).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.algorithms.aggregation import MetricSums, Normaliser, aggregate, mean_over
from engines.algorithms.distillation import DistillationTerm
from engines.algorithms.inputs import PolicyBatch
from engines.algorithms.kl import KLPenalty
from engines.algorithms.losses import PolicyLoss
from engines.algorithms.rollout_correction import Mismatch, Step, correct, correction_sums, gap_sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """loss, metrics = objective(batch, normaliser); then loss.backward()."""

    method: PolicyLoss
    params: Mapping[str, Any]  # keyword arguments of the method's functions
    aggregation: str  # a mode of `aggregate`
    against_rollout: bool  # the ratio's denominator is the rollout policy
    interpolated: bool  # the proximal policy's log-probs are those of `loglinear`
    corrections: tuple[Step, ...]  # applied here unless the batch brings its weights
    kl: KLPenalty | None  # in the loss; None: not there
    kl_coefficient: float  # per nat
    kl_unbiased: bool  # times the ratio to the old policy
    entropy_coefficient: float  # per nat
    entropy_floor: float | None  # nats
    entropy_top_share: float  # of the tokens whose policy loss counts
    distillation: DistillationTerm | None = None  # of a teacher; None: there is none

    @property
    def needs(self) -> frozenset[str]:
        """Columns that a batch must have beside logprobs, advantages, old_logprobs."""
        needs = set(self.method.needs)
        needs |= {"ref_logprobs"} if self.kl is not None else set()
        needs |= {"entropy"} if self.entropy_gradient or self.entropy_top_share < 1 else set()
        needs |= {"rollout_logprobs"} if self.against_rollout or self.corrections else set()
        needs |= {"rollout_logprobs", "staleness"} if self.interpolated else set()
        needs |= self.distillation.needs if self.distillation is not None else set()
        # A mean over the batch is not that of a micro-batch, so it is taken before the update.
        normalized = any(params.get("normalize") for _, params in self.corrections)
        needs |= {"correction_weights"} if normalized else set()
        return frozenset(needs)

    @property
    def entropy_gradient(self) -> bool:
        """Whether `entropy` must carry a gradient."""
        return self.entropy_coefficient > 0

    @property
    def selects(self) -> bool:
        """Whether tokens are chosen over the whole mini-batch (`select`)."""
        return self.method.select is not None or self.entropy_top_share < 1

    def select(self, mini_batch: PolicyBatch) -> Tensor:
        """bool [2, T]: PolicyBatch.selected and .counted, from a whole mini-batch, of all ranks."""
        selected = counted = mini_batch.mask
        with torch.no_grad():
            if self.method.select is not None:
                selected = self.method.select(self._against(mini_batch), **self.params)
            if self.entropy_top_share < 1:
                counted = self._uncertain(mini_batch)
        return torch.stack([selected, counted])

    def __call__(self, batch: PolicyBatch, normaliser: Normaliser) -> tuple[Tensor, MetricSums]:
        """The loss of one micro-batch.

        Args:
            batch: whole rows, with the columns that `needs` names.
            normaliser: the counts of the whole mini-batch, of all ranks.

        Returns:
            Scalar with gradient; and metrics, of which `loss`, `policy_loss` and `trained_tokens`,
            those with a part in the loss, add up over the micro-batches and ranks, and means are over
            the tokens with mask 1.
        """
        batch = self._against(batch)
        batch, metrics = self._corrected(batch)
        trained = batch.mask  # tokens that have a part in the loss
        weighs_all = (
            self.kl is not None or self.entropy_coefficient or self.distillation is not None
        )
        if not (weighs_all or batch.weights is None or self.method.own_weights):
            trained = trained & (batch.under_mask(batch.weights) != 0)
        metrics += MetricSums(sums={"trained_tokens": trained.sum().float()})
        loss, policy_metrics = self._policy_term(batch, normaliser)
        metrics += policy_metrics
        if self.kl is not None:
            divergence = self._divergence(batch)
            loss = loss + self.kl_coefficient * self._aggregated(divergence, batch, normaliser)
            metrics += MetricSums(means={"kl_ref": mean_over(divergence, batch.mask)})
        if self.distillation is not None:
            taught, sums = self.distillation(batch)
            metrics += sums
            if taught is not None:
                term = self._aggregated(taught, batch, normaliser)
                loss = loss + self.distillation.coefficient * term
        if batch.entropy is not None:
            entropy = batch.under_mask(batch.entropy)
            metrics += MetricSums(means={"entropy": mean_over(entropy, batch.mask)})
            if self.entropy_coefficient:
                low = entropy.clamp(max=self.entropy_floor) if self.entropy_floor else entropy
                loss = loss - self.entropy_coefficient * self._aggregated(low, batch, normaliser)
        return loss, metrics + MetricSums(sums={"loss": loss.detach() / normaliser.ranks})

    def _against(self, batch: PolicyBatch) -> PolicyBatch:
        """The batch with the log-probs that stand below the ratio as its old_logprobs."""
        if self.against_rollout:
            return dataclasses.replace(batch, old_logprobs=batch.rollout_logprobs)
        if not self.interpolated:
            return batch
        rollout, staleness = batch.rollout_logprobs, batch.staleness
        assert rollout is not None and staleness is not None, "see `needs`"
        return dataclasses.replace(
            batch, old_logprobs=loglinear(batch.logprobs, rollout, staleness)
        )

    def _corrected(self, batch: PolicyBatch) -> tuple[PolicyBatch, MetricSums]:
        """The batch with weights and without the tokens that the corrections leave out."""
        if batch.rollout_logprobs is None:
            assert batch.weights is not None or not self.corrections, "they need rollout_logprobs"
            return self._weighted(batch, batch.weights, batch.kept), MetricSums()
        mismatch = Mismatch(
            rows=batch.rows,
            mask=batch.mask,
            logprobs=batch.logprobs.detach() if self.against_rollout else batch.proximal,
            rollout_logprobs=batch.rollout_logprobs,
            advantages=batch.advantages,
        )
        # An interpolated policy is nearer to the rollout engine's than any that was trained.
        policy = batch.logprobs.detach() if self.interpolated else mismatch.logprobs
        metrics = gap_sums(dataclasses.replace(mismatch, logprobs=policy))
        weights, kept = batch.weights, batch.kept
        if weights is None and self.corrections:
            weights, kept = correct(mismatch, self.corrections)
        if weights is not None:
            metrics += correction_sums(mismatch, weights, kept, self.corrections)
        return self._weighted(batch, weights, kept), metrics

    def _weighted(
        self, batch: PolicyBatch, weights: Tensor | None, kept: Tensor | None
    ) -> PolicyBatch:
        mask = batch.mask if kept is None else batch.mask & kept
        if self.against_rollout and self.method.ratio:  # the ratio itself corrects
            weights = batch.weights
        return dataclasses.replace(batch, weights=weights, mask=mask)

    def _policy_term(self, batch: PolicyBatch, normaliser: Normaliser) -> tuple[Tensor, MetricSums]:
        result = self.method.loss(batch, **self.params)
        values = result.values
        if batch.weights is not None and not self.method.own_weights:
            values = values * batch.under_mask(batch.weights.detach())
        if self.entropy_top_share < 1:
            counted = self._uncertain(batch) if batch.counted is None else batch.counted
            values = torch.where(counted, values, 0.0)
        loss = self._aggregated(values, batch, normaliser)
        total = MetricSums(sums={"policy_loss": loss.detach() / normaliser.ranks})
        return loss, result.metrics + total

    def _uncertain(self, batch: PolicyBatch) -> Tensor:
        assert batch.entropy is not None, "entropy.top_share needs the entropy"
        return high_entropy(batch.entropy.detach(), batch.mask, self.entropy_top_share)

    def _divergence(self, batch: PolicyBatch) -> Tensor:
        assert self.kl is not None and batch.ref_logprobs is not None, "the KL needs ref_logprobs"
        reference = batch.under_mask(batch.ref_logprobs.detach())
        divergence = self.kl(batch.under_mask(batch.logprobs), reference)
        return divergence * batch.log_ratio().exp() if self.kl_unbiased else divergence

    def _aggregated(self, values: Tensor, batch: PolicyBatch, normaliser: Normaliser) -> Tensor:
        return aggregate(values, batch.mask, batch.rows, normaliser, self.aggregation)


def high_entropy(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """The tokens whose entropy is in the upper `share` of those with mask 1: bool [T].

    The bound is the (1 - share) quantile, interpolated. "Beyond the 80/20 Rule", arXiv:2506.01939.

    Args:
        entropy: [T], nats.
        mask: bool [T].
        share: in (0, 1].
    """
    ordered = entropy[mask].sort().values
    if ordered.numel() == 0:
        return mask
    place = (1 - share) * (ordered.numel() - 1)
    low = int(place)
    high = min(low + 1, ordered.numel() - 1)
    bound = torch.lerp(ordered[low], ordered[high], place - low)
    return mask & (entropy >= bound)


def loglinear(logprobs: Tensor, rollout_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """log pi_prox = log pi_b + alpha (log pi - log pi_b), alpha = (v_prox - v_b) / (v_theta - v_b).

    The proximal policy is the one whose ratio to the policy in training a loss bounds: version
    k - 1, out of which the update of step k makes version k. Where its log-probs are neither a
    column nor made in a first pass, they are estimated from the two ends of a line: the behaviour
    policy's and those of the policy in training.

    v_b is the version that wrote the token, v_prox = k - 1 the one before the update and v_theta = k
    the one that the update makes, so alpha = s / (s + 1) with the staleness s = k - 1 - v_b. pi is
    the policy as it is at the optimizer step: only after the last of them is it version k. At the
    first it still is version k - 1, so there the result is too near to the behaviour policy.

    A token of version k - 1 has alpha = 0: its proximal log-prob is what the rollout engine said,
    and the engine's rounding, or another number format, stays in the ratio.

    AReaL's prox_logp_method: loglinear (github.com/inclusionAI/AReaL, decoupled PPO of
    arXiv:2505.24298), described in A-3PO, arXiv:2512.06547. AReaL takes v_theta from its engine
    during the update, where it is k - 1: its alpha is this one for a staleness of s - 1.

    Args:
        logprobs: log pi [T] of the policy in training, nats.
        rollout_logprobs: log pi_b [T], nats; where one is not known (NaN), log pi stands for it.
        staleness: s [T], in versions; alpha is kept within [0, 1].

    Returns:
        log pi_prox [T], nats, detached.
    """
    policy, behaviour = logprobs.detach(), rollout_logprobs.detach()
    stale = staleness.to(policy.dtype).clamp(min=0)
    proximal = behaviour + stale / (stale + 1) * (policy - behaviour)
    return torch.where(behaviour.isnan(), policy, proximal)
