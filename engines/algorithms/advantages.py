"""Advantage estimators by name: from rewards to one advantage per token.

The estimators: group_advantages.py (one number per sample, compared within its group) and
token_advantages.py (critic, discounting, turns, a baseline for each position). A new one is one
function and one line in ADVANTAGES, or a user's import path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardKL:
    """A KL to the reference policy that is taken off the rewards."""

    estimator: str  # a name in kl.KL_ESTIMATORS
    coefficient: float  # reward per nat


def estimate(
    batch: AdvantageBatch,
    estimator: Estimator,
    params: Mapping[str, Any],
    reward_kl: RewardKL | None = None,
) -> Advantages:
    """Advantages of a whole batch, after the KL penalty where it is a reward's.

    Args:
        batch: N samples, T tokens.
        estimator: one of ADVANTAGES, or a user's of the same signature.
        params: its keyword arguments.
        reward_kl: the penalty; it makes token rewards of the rewards, and adds the metric kl_ref.

    Returns:
        Advantages [T], and what else the estimator gives.
    """
    if reward_kl is None:
        return estimator(batch, **params)
    rewards, metrics = penalised_rewards(batch, reward_kl.estimator, reward_kl.coefficient)
    result = estimator(dataclasses.replace(batch, token_rewards=rewards), **params)
    return dataclasses.replace(result, metrics=result.metrics + metrics)
