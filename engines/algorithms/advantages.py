"""Advantage estimators by name: from rewards to one advantage per token.

The estimators: group_advantages.py (one number per sample, compared within its group),
token_advantages.py (critic, discounting, turns, a baseline for each position) and
tree_advantages.py (compared within the subtrees of a prompt's tree). A new one is one function and
one line in ADVANTAGES, or a user's import path.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engines.algorithms.aggregation import MetricSums
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
from engines.algorithms.tree_advantages import tree, tree_segment, tree_sibling

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
    "tree": tree,
    "tree_segment": tree_segment,
    "tree_sibling": tree_sibling,
}


# Fields of AdvantageBatch beside rows, mask, rewards, groups, components and baselines that an
# estimator of ADVANTAGES looks at, where it looks at any. Others need not be read.
_BASELINE = frozenset({"logprobs", "sum_pi_squared", "correction_weights"})
NEEDS: Mapping[str, frozenset[str]] = {
    "gae": frozenset({"values"}),
    "gigpo": frozenset({"steps", "states"}),
    "optimal_token_baseline": _BASELINE,
    "multi_turn_optimal_token_baseline": _BASELINE,
    **dict.fromkeys(("tree", "tree_segment", "tree_sibling"), frozenset({"paths"})),
}
ALL_FIELDS = frozenset({"values", "ref_logprobs", "steps", "states", "paths"}) | _BASELINE


class Scope(enum.Enum):
    """What a token's advantage depends on: how a batch may be cut, between groups, into parts."""

    GROUP = "group"  # its sample's group alone: each part is estimated by itself
    SAMPLES = "samples"  # one number per sample, from totals, token counts, components of all
    TOKENS = "tokens"  # its sample alone, and the mean and variance of all tokens
    TURNS = "turns"  # its sample's group, and one number for each turn of all
    BATCH = "batch"  # anything: the batch is not cut


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageEstimator:
    """A user's estimator that says what it looks at; a bare function is given the whole batch."""

    estimator: Estimator
    per_group: bool  # a token's advantage depends on its group alone: a part of the groups will do


def scope_of(kind: str, params: Mapping[str, Any]) -> Scope:
    """What an estimator of ADVANTAGES looks at, by its keyword arguments."""
    over_batch = {
        "grpo": not {"batch", "task"}.isdisjoint((params.get("baseline"), params.get("normalize"))),
        "cpgd": params.get("weight") == "filter",
        "gpg": True,
        "gdpo": True,
        "reinforce_plus_plus_baseline": True,
    }
    if over_batch.get(kind):
        return Scope.SAMPLES
    if kind == "reinforce_plus_plus" or params.get("whiten"):
        return Scope.TOKENS
    return Scope.TURNS if params.get("among") == "batch" else Scope.GROUP


def before_whitening(kind: str, batch: AdvantageBatch, params: Mapping[str, Any]) -> Advantages:
    """What an estimator of Scope.TOKENS whitens: its advantages, or REINFORCE++'s returns."""
    if "whiten" not in params:
        return reinforce(batch, **params)
    each = {"prefix_weight": "per_leaf"} if "prefix_weight" in params else {}
    return ADVANTAGES[kind](batch, **{**params, **each, "whiten": False})


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
    batch, metrics = penalised(batch, reward_kl)
    result = estimator(batch, **params)
    return dataclasses.replace(result, metrics=result.metrics + metrics)


def penalised(
    batch: AdvantageBatch, reward_kl: RewardKL | None
) -> tuple[AdvantageBatch, MetricSums]:
    """The batch with token rewards after the KL penalty, if there is one; the metric kl_ref."""
    if reward_kl is None:
        return batch, MetricSums()
    rewards, metrics = penalised_rewards(batch, reward_kl.estimator, reward_kl.coefficient)
    return dataclasses.replace(batch, token_rewards=rewards), metrics
