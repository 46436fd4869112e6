"""Adapters for value_entropy_kl.json: the critic's loss, KL penalties and their controller."""

from __future__ import annotations

import torch

from configs.algorithm.algorithm import KLConfig
from engines.algorithms.inputs import AdvantageBatch
from engines.algorithms.kl import KL_ESTIMATORS, penalised_rewards
from engines.algorithms.kl_controller import adapted_coefficient
from engines.algorithms.losses import value_loss
from tests.parity.answers import Adapter, Answer, leaf, mode_of, normaliser, shaped
from tests.parity.vectors import Case

NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}  # the reference's older names


def estimator_name(name: str) -> str:
    """Our name of an estimator; ValueError (by the recipe's check) for one that is not known."""
    plain = name.removesuffix("+")
    ours = NAMES.get(plain, plain) + ("+" if name.endswith("+") else "")
    return KLConfig.model_validate({"estimator": ours}).estimator


def value_loss_case(case: Case) -> Answer:
    rows, mask = case.rows(), case.mask()
    values = leaf(case.flat("vpreds"))
    loss, metrics = value_loss(
        values,
        case.flat("returns"),
        case.flat("values"),
        mask,
        rows,
        normaliser(mask, rows, case.params, mode_of(case)),
        clip=case.params.get("cliprange_value", 0.5),
        aggregation=mode_of(case),
    )
    loss.backward()
    assert values.grad is not None
    return {
        "vf_loss": loss,
        "vf_clipfrac": metrics.values()["value_clip_share"],
        "grad_vpreds": shaped(values.grad, case),
    }


def kl_penalty_case(case: Case) -> Answer:
    logprobs = leaf(case.tensor("logprob"))
    name = estimator_name(case.params["kl_penalty"])
    divergence = KL_ESTIMATORS[name](logprobs, case.tensor("ref_logprob"))
    divergence.sum().backward()
    return {"kl": divergence, "grad_logprob_of_sum": logprobs.grad}


def controller_case(case: Case) -> Answer:
    coefficient, after = case.params["init_kl_coef"], []
    for kl, samples in zip(case.inputs["current_kl"], case.inputs["n_steps"], strict=True):
        coefficient = adapted_coefficient(
            coefficient,
            kl,
            target=case.params["target_kl"],
            horizon=case.params["horizon"],
            samples=samples,
        )
        after.append(coefficient)
    return {"value_after_each_update": torch.tensor(after, dtype=torch.float64)}


def penalised(
    case: Case, mask: torch.Tensor, estimator: str, coefficient: float
) -> tuple[torch.Tensor, float]:
    """Our penalised rewards, metrics."""
    count, width = torch.tensor(case.inputs["token_level_scores"]).shape
    batch = AdvantageBatch(
        rows=case.rows("token_level_scores"),
        mask=mask,
        rewards=torch.zeros(count, dtype=case.dtype),
        groups=torch.arange(count),
        token_rewards=case.flat("token_level_scores"),
        logprobs=case.flat("old_log_prob"),
        ref_logprobs=case.flat("ref_log_prob"),
    )
    rewards, metrics = penalised_rewards(batch, estimator, coefficient)
    return rewards.view(count, width), metrics.values()["kl_ref"]


def compute_rewards_case(case: Case) -> Answer:
    everything = torch.ones_like(case.flat("token_level_scores"), dtype=torch.bool)
    rewards, _ = penalised(case, everything, "k1", case.params["kl_ratio"])
    return {"token_level_rewards": rewards}


def apply_kl_case(case: Case) -> Answer:
    coefficient = case.params["init_kl_coef"]
    name = estimator_name(case.params["kl_penalty"])
    rewards, kl = penalised(case, case.mask(), name, coefficient)
    after = adapted_coefficient(
        coefficient,
        kl,
        target=case.params["target_kl"],
        horizon=case.params["horizon"],
        samples=rewards.shape[0],
    )
    return {
        "token_level_rewards": rewards,
        "metrics": {
            "actor/reward_kl_penalty": kl,
            "actor/reward_kl_penalty_coeff": coefficient,
        },
        "kl_coef_after": after,
    }


ADAPTERS: dict[str, Adapter] = {
    "value_loss": value_loss_case,
    "kl_penalty": kl_penalty_case,
    "adaptive_kl_controller": controller_case,
    "compute_rewards": compute_rewards_case,
    "apply_kl_penalty": apply_kl_case,
}
