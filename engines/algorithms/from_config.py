"""From a recipe's `algorithm` to the functions of this room: names and import paths resolved.

The only file here that knows the settings; the others take functions, tensors and numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from configs.algorithm.algorithm import AlgorithmConfig
from configs.algorithm.corrections import ShapingConfig
from configs.algorithm.distillation import DistillAlgorithm, ReverseKL
from configs.base import Method, UserFunction
from configs.imports import imported
from engines.algorithms.advantages import (
    ADVANTAGES,
    ALL_FIELDS,
    NEEDS,
    AdvantageEstimator,
    Estimator,
    RewardKL,
    Scope,
    estimate,
    scope_of,
)
from engines.algorithms.distillation import DistillationTerm, no_advantages, reverse_kl_advantages
from engines.algorithms.inputs import AdvantageBatch, Advantages
from engines.algorithms.kl import KL_ESTIMATORS
from engines.algorithms.losses import POLICY_LOSSES, PolicyLoss
from engines.algorithms.objective import Objective
from engines.algorithms.reward_shaping import Penalties, Shaped, shape
from engines.algorithms.rollout_correction import CORRECTIONS, Step
from engines.algorithms.sample_selection import SELECTIONS, SelectionRule


def objective_of(algorithm: AlgorithmConfig) -> Objective:
    """The loss of an update."""
    method = loss_of(algorithm)
    in_loss = algorithm.kl.placement == "loss" and algorithm.kl.coefficient > 0
    return Objective(
        method=method,
        params=algorithm.loss.arguments(),
        aggregation=method.aggregation or algorithm.aggregation,
        against_rollout=algorithm.ratio_against == "rollout_logprobs",
        interpolated=algorithm.proximal == "loglinear",
        corrections=corrections_of(algorithm),
        kl=KL_ESTIMATORS[algorithm.kl.estimator] if in_loss else None,
        kl_coefficient=algorithm.kl.coefficient,
        kl_unbiased=algorithm.kl.unbiased,
        entropy_coefficient=algorithm.entropy.coefficient,
        entropy_floor=algorithm.entropy.floor,
        entropy_top_share=algorithm.entropy.top_share,
        distillation=distillation_of(algorithm),
    )


def distillation_of(algorithm: AlgorithmConfig) -> DistillationTerm | None:
    """What a teacher's scores add to the objective; None without teachers."""
    if not isinstance(algorithm, DistillAlgorithm):
        return None
    chosen = algorithm.distillation
    params = {name: value for name, value in chosen.loss.arguments().items() if name != "top_k"}
    return DistillationTerm(loss=chosen.loss.kind, coefficient=chosen.coefficient, params=params)


def loss_of(algorithm: AlgorithmConfig) -> PolicyLoss:
    """The policy loss.

    A user's path leads to a function loss(batch, **params) -> TokenLoss, or to a PolicyLoss.
    """
    if not isinstance(algorithm.loss, UserFunction):
        return POLICY_LOSSES[algorithm.loss.kind]
    loss = imported(algorithm.loss.path)
    return loss if isinstance(loss, PolicyLoss) else PolicyLoss(loss=loss)


def corrections_of(algorithm: AlgorithmConfig) -> tuple[Step, ...]:
    """The corrections with their parameters, in order."""
    return tuple(
        (_chosen(step, step.kind, CORRECTIONS), step.arguments()) for step in algorithm.correction
    )


def advantages_of(batch: AdvantageBatch, algorithm: AlgorithmConfig) -> Advantages:
    """Advantages of a whole batch, after the KL penalty where it is a reward's."""
    estimator, _ = estimator_of(algorithm)
    arguments = algorithm.advantage.arguments()
    return estimate(batch, estimator, arguments, reward_kl_of(algorithm))


def estimator_of(algorithm: AlgorithmConfig) -> tuple[Estimator, Scope]:
    """The advantage estimator, and what it looks at.

    A user's path leads to a function estimator(batch, **params) -> Advantages, which is given the
    whole batch, or to an AdvantageEstimator.
    """
    choice = algorithm.advantage
    if isinstance(algorithm, DistillAlgorithm) and not algorithm.distillation.task_weight:
        return no_advantages, Scope.GROUP
    if not isinstance(choice, UserFunction):
        return ADVANTAGES[choice.kind], scope_of(choice.kind, choice.arguments())
    function = imported(choice.path)
    if isinstance(function, AdvantageEstimator):
        return function.estimator, Scope.GROUP if function.per_group else Scope.BATCH
    return function, Scope.BATCH


def fields_of(algorithm: AlgorithmConfig) -> frozenset[str]:
    """The fields of AdvantageBatch that a recipe needs filled; a user's function gets all."""
    choice = algorithm.advantage
    penalty = {"logprobs", "ref_logprobs"} if reward_kl_of(algorithm) is not None else set()
    taught = {"logprobs", "teacher_logprobs"} if _reverse_kl_of(algorithm) is not None else set()
    fields = ALL_FIELDS if isinstance(choice, UserFunction) else NEEDS.get(choice.kind, frozenset())
    return fields | penalty | taught


def with_teacher(task: Advantages, batch: AdvantageBatch, algorithm: AlgorithmConfig) -> Advantages:
    """The task's advantages, weighed, and the reverse KL to a teacher where it is an advantage.

    A recipe without teachers leaves them as they are.
    """
    if not isinstance(algorithm, DistillAlgorithm):
        return task
    advantages = algorithm.distillation.task_weight * task.advantages
    coefficient = _reverse_kl_of(algorithm)
    if coefficient is not None:
        assert batch.logprobs is not None and batch.teacher_logprobs is not None, "see fields_of"
        taught = reverse_kl_advantages(batch.logprobs, batch.teacher_logprobs)
        advantages = advantages + coefficient * taught.where(batch.mask, 0.0)
    return dataclasses.replace(task, advantages=advantages)


def _reverse_kl_of(algorithm: AlgorithmConfig) -> float | None:
    """The coefficient of a teacher's reverse KL that is an advantage, if it is one."""
    chosen = algorithm.distillation if isinstance(algorithm, DistillAlgorithm) else None
    return chosen.coefficient if chosen and isinstance(chosen.loss, ReverseKL) else None


def reward_kl_of(algorithm: AlgorithmConfig) -> RewardKL | None:
    """The KL that is taken off the rewards, if there is one."""
    kl = algorithm.kl
    if kl.placement != "reward" or not kl.coefficient > 0:
        return None
    return RewardKL(estimator=kl.estimator, coefficient=kl.coefficient)


def shaped_rewards(
    rewards: Tensor,
    groups: Tensor,
    lengths: Tensor,
    truncated: Tensor,
    shaping: ShapingConfig,
    max_tokens: int,
    repetition: Tensor | None = None,
) -> Shaped:
    """reward_shaping.shape as the recipe says; its tensors.

    max_tokens: the longest response in tokens, where the overlong penalty does not say.
    """
    overlong = None
    if shaping.overlong is not None:
        limit = {"max_tokens": shaping.overlong.max_tokens or max_tokens}
        overlong = shaping.overlong.model_dump() | limit
    penalties = Penalties(
        overlong=overlong,
        length=None if shaping.length is None else shaping.length.model_dump(),
        repetition=None if shaping.repetition is None else shaping.repetition.model_dump(),
    )
    return shape(
        rewards, groups, lengths, truncated, penalties, shaping.truncated, repetition=repetition
    )


def selection_of(algorithm: AlgorithmConfig) -> tuple[SelectionRule, ...]:
    """The rules of selection, in order."""
    return tuple(
        SelectionRule(
            name=step.kind,
            function=_chosen(step, step.kind, SELECTIONS),
            params=step.arguments(),
            before_shaping=step.kind == "success_rate"
            or (step.kind == "informative" and step.rewards == "given"),
        )
        for step in algorithm.selection
    )


def _chosen(
    choice: Method, kind: str, table: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """The user's function, or the one of the name in the table."""
    return imported(choice.path) if isinstance(choice, UserFunction) else table[kind]
