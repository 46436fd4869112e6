"""The number to call backward on: policy loss + KL + entropy of one micro-batch.

Built once from the recipe (`Objective.of`); it holds functions and numbers only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from configs.algorithm import AlgorithmConfig
from engines.aggregation import Normaliser, aggregate
from engines.kl import KL_ESTIMATORS
from engines.losses import POLICY_LOSSES, PolicyLoss
from engines.metric_sums import MetricSums, mean_over
from engines.policy_batch import PolicyBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """loss, metrics = objective(batch, normaliser); then loss.backward()."""

    method: PolicyLoss
    params: Mapping[str, Any]  # keyword arguments of the method's functions
    aggregation: str
    kl: Callable[[Tensor, Tensor], Tensor] | None  # in the loss; None: not there
    kl_coefficient: float
    entropy_coefficient: float
    entropy_floor: float | None  # nats

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> Objective:
        """Resolve names and import paths."""
        method = resolved_loss(algorithm)
        in_loss = algorithm.kl.placement == "loss" and algorithm.kl.coefficient > 0
        return cls(
            method=method,
            params=algorithm.loss.arguments(),
            aggregation=method.aggregation or algorithm.aggregation,
            kl=KL_ESTIMATORS[algorithm.kl.estimator] if in_loss else None,
            kl_coefficient=algorithm.kl.coefficient,
            entropy_coefficient=algorithm.entropy.coefficient,
            entropy_floor=algorithm.entropy.floor,
        )

    @property
    def needs(self) -> frozenset[str]:
        """Columns of PolicyBatch that must be there beside logprobs, advantages, old_logprobs."""
        needs = set(self.method.needs)
        needs |= {"ref_logprobs"} if self.kl is not None else set()
        needs |= {"entropy"} if self.entropy_coefficient else set()
        return frozenset(needs)

    def select(self, mini_batch: PolicyBatch) -> Tensor | None:
        """bool [T] for PolicyBatch.selected, from all tokens of a mini-batch; None: not needed."""
        if self.method.select is None:
            return None
        return self.method.select(mini_batch, **self.params)

    def __call__(
        self,
        batch: PolicyBatch,
        normaliser: Normaliser,
        kl_coefficient: float | None = None,
    ) -> tuple[Tensor, MetricSums]:
        """Loss (scalar with gradient) and metrics of one micro-batch.

        kl_coefficient replaces the recipe's, for an adaptive controller.
        """
        token_loss = self.method.loss(batch, **self.params)
        values = token_loss.values
        if batch.weights is not None:
            values = values * batch.weights.detach()
        loss = aggregate(values, batch.mask, batch.rows, normaliser, self.aggregation)
        metrics = token_loss.metrics + MetricSums(
            means={"policy_loss": torch.stack([loss.detach().float(), loss.new_ones(()).float()])}
        )
        if self.kl is not None:
            assert batch.ref_logprobs is not None, "the KL term needs ref_logprobs"
            reference = batch.ref_logprobs.where(batch.mask, 0.0)
            divergence = self.kl(batch.logprobs.where(batch.mask, 0.0), reference)
            coefficient = self.kl_coefficient if kl_coefficient is None else kl_coefficient
            loss = loss + coefficient * aggregate(
                divergence, batch.mask, batch.rows, normaliser, self.aggregation
            )
            metrics += MetricSums(means={"kl_ref": mean_over(divergence, batch.mask)})
        if batch.entropy is not None:
            entropy = batch.entropy
            metrics += MetricSums(means={"entropy": mean_over(entropy, batch.mask)})
            if self.entropy_coefficient:
                if self.entropy_floor is not None:
                    entropy = entropy.clamp(max=self.entropy_floor)
                loss = loss - self.entropy_coefficient * aggregate(
                    entropy, batch.mask, batch.rows, normaliser, self.aggregation
                )
        return loss, metrics


def resolved_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """The method of a recipe, from the table or from a user's import path."""
    if algorithm.loss.kind != "function":
        return POLICY_LOSSES[algorithm.loss.kind]
    found = imported(algorithm.loss.path)
    return found if isinstance(found, PolicyLoss) else PolicyLoss(loss=found)


def imported(path: str) -> Any:
    """The object at package.module:name."""
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = vars(found)[part]
    return found
