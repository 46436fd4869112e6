"""Advantage estimators by name: from rewards to one advantage per token.

The estimators: group_advantages.py (one number per sample, compared within its group),
token_advantages.py (critic, discounting, turns), token_baselines.py (optimal token baseline).
A new one is one function and one line in ADVANTAGES, or a user's import path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from configs.algorithm.algorithm import AlgorithmConfig
from engines.algorithms.group_advantages import (
    cpgd,
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from engines.algorithms.inputs import AdvantageBatch, Advantages
from engines.algorithms.kl import penalised_rewards
from engines.algorithms.token_advantages import (
    gae,
    gigpo,
    multi_turn_optimal_token_baseline,
    optimal_token_baseline,
    reinforce,
    reinforce_plus_plus,
    remax,
)
from engines.imports import imported

Estimator = Callable[..., Advantages]  # estimator(batch, **params)

ADVANTAGES: Mapping[str, Estimator] = {
    "gae": gae,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "opo": opo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "reinforce": reinforce,
    "remax": remax,
    "gpg": gpg,
    "cpgd": cpgd,
    "gdpo": gdpo,
    "maxrl": maxrl,
    "gigpo": gigpo,
    "optimal_token_baseline": optimal_token_baseline,
    "multi_turn_optimal_token_baseline": multi_turn_optimal_token_baseline,
}


def estimate(
    batch: AdvantageBatch, algorithm: AlgorithmConfig, kl_coefficient: float | None = None
) -> Advantages:
    """Advantages of a whole batch as the recipe says, after the KL penalty where it is a reward's.

    kl_coefficient replaces the recipe's, for an adaptive controller.
    """
    kl = algorithm.kl
    metrics = None
    if kl.placement == "reward" and kl.coefficient > 0:
        coefficient = kl.coefficient if kl_coefficient is None else kl_coefficient
        token_rewards, metrics = penalised_rewards(batch, kl.estimator, coefficient)
        batch = dataclasses.replace(batch, token_rewards=token_rewards)
    choice = algorithm.advantage
    estimator = imported(choice.path) if choice.kind == "function" else ADVANTAGES[choice.kind]
    result: Advantages = estimator(batch, **choice.arguments())
    if metrics is None:
        return result
    return dataclasses.replace(result, metrics=result.metrics + metrics)
