"""Adapters for advantages.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from configs.algorithm import advantages as settings
from configs.base import Method
from engines.algorithms.advantages import ADVANTAGES
from engines.algorithms.inputs import AdvantageBatch
from tests.parity.answers import Adapter, Answer, group_numbers, shaped
from tests.parity.vectors import Case


def outcome_batch(case: Case) -> AdvantageBatch:
    """One reward per sample: the sum of the row, padding included, as verl takes it."""
    rewards = case.tensor("token_level_rewards").sum(-1)
    names = list(case.params.get("gdpo_reward_keys") or ())
    return AdvantageBatch(
        rows=case.rows(),
        mask=case.mask(),
        rewards=rewards,
        groups=_groups(case, rewards.numel()),
        components={name: case.tensor(name) for name in names},
    )


def dense_batch(case: Case) -> AdvantageBatch:
    """A reward for each token."""
    rewards = case.tensor("token_level_rewards").sum(-1)
    return AdvantageBatch(
        rows=case.rows(),
        mask=case.mask(),
        rewards=rewards,
        groups=_groups(case, rewards.numel()),
        token_rewards=case.flat("token_level_rewards"),
        values=case.optional("values"),
        logprobs=case.optional("old_log_probs"),
        sum_pi_squared=case.optional("sum_pi_squared"),
        correction_weights=case.optional("rollout_is_weights"),
        baselines=case.optional("reward_baselines"),
    )


def _groups(case: Case, count: int) -> torch.Tensor:
    return group_numbers(case.inputs.get("index", list(range(count))))


def estimated(case: Case, batch: AdvantageBatch, choice: Method) -> Answer:
    """Advantages and returns by the method of a recipe."""
    kind = choice.model_dump()["kind"]
    result = ADVANTAGES[kind](batch, **choice.arguments())
    assert result.returns is not None
    return {
        "advantages": shaped(result.advantages, case),
        "returns": shaped(result.returns, case),
    }


def adapter(
    make: Callable[[dict[str, Any]], Method], batch: Callable[[Case], AdvantageBatch]
) -> Adapter:
    """The adapter that makes a recipe's choice from a case's parameters."""

    def answer(case: Case) -> Answer:
        choice = make(case.params)
        return estimated(case, batch(case), choice)

    return answer


def _normalize(params: dict[str, Any]) -> Any:
    return "group" if params.get("norm_adv_by_std_in_grpo", True) else "none"


def _gdpo(params: dict[str, Any]) -> Method:
    names = params.get("gdpo_reward_keys") or ()
    weights = params.get("gdpo_reward_weights") or [1.0] * len(names)
    return settings.GDPOAdvantage(
        weights=dict(zip(names, weights, strict=True)),
        normalize=params.get("norm_adv_by_std_in_grpo", True),
        epsilon=params.get("epsilon", 1e-6),
    )


def _grpo(params: dict[str, Any]) -> Method:
    return settings.GRPOAdvantage(normalize=_normalize(params), epsilon=params.get("epsilon", 1e-6))


ADAPTERS: dict[str, Adapter] = {
    "grpo": adapter(_grpo, outcome_batch),
    "grpo_vectorized": adapter(_grpo, outcome_batch),
    "grpo_passk": adapter(
        lambda p: settings.PassKAdvantage(
            normalize=p.get("norm_adv_by_std_in_grpo", True), epsilon=p.get("epsilon", 1e-6)
        ),
        outcome_batch,
    ),
    "rloo": adapter(lambda p: settings.RLOOAdvantage(), outcome_batch),
    "rloo_vectorized": adapter(lambda p: settings.RLOOAdvantage(lone="zero"), outcome_batch),
    "opo": adapter(lambda p: settings.OPOAdvantage(), outcome_batch),
    "reinforce_plus_plus": adapter(
        lambda p: settings.ReinforcePlusPlusAdvantage(gamma=p.get("gamma", 1.0)), dense_batch
    ),
    "reinforce_plus_plus_baseline": adapter(
        lambda p: settings.ReinforcePlusPlusBaselineAdvantage(), outcome_batch
    ),
    "remax": adapter(lambda p: settings.ReMaxAdvantage(), dense_batch),
    "gpg": adapter(lambda p: settings.GPGAdvantage(scale=p.get("f_norm", 1.0)), outcome_batch),
    "gdpo": adapter(_gdpo, outcome_batch),
    "gae": adapter(
        lambda p: settings.GAEAdvantage(gamma=p.get("gamma", 1.0), lam=p.get("lam", 1.0)),
        dense_batch,
    ),
    "optimal_token_baseline": adapter(
        lambda p: settings.OptimalTokenBaselineAdvantage(
            zero_tail=p.get("handle_zero_tail", True), epsilon=p.get("epsilon", 1e-8)
        ),
        dense_batch,
    ),
    "tir_optimal_token_baseline": adapter(
        lambda p: settings.MultiTurnOptimalTokenBaselineAdvantage(
            zero_tail=p.get("handle_zero_tail", True), epsilon=p.get("epsilon", 1e-8)
        ),
        dense_batch,
    ),
}
