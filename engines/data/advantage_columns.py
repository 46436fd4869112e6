"""Columns in, columns out: an estimator's inputs from a stored batch, its advantages into another.

What comes out, with the corrections for the rollout engine's log-probs, is written as columns, so
that the update, and a replay of it, computes nothing but the loss. At the end: how columns are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.algorithm.algorithm import AlgorithmConfig
from configs.algorithm.corrections import WeightCorrection
from engines.algorithms.from_config import advantages_of, corrections_of
from engines.algorithms.inputs import AdvantageBatch
from engines.algorithms.jagged import Rows
from engines.algorithms.rollout_correction import Mismatch, correct
from engines.algorithms.rollout_correction_metrics import correction_metrics
from engines.data.staleness import token_staleness
from storage.batches.columns import SCORE
from storage.batches.refs import BatchRef
from storage.batches.writing import Jagged, write_batch
from storage.objects.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The samples that train, after shaping and selection; [T] response tokens.

    Two samples of 2 and 1 tokens: rewards [1.0, 0.0], mask [1, 1, 1], components
    {"math": [1.0, 0.0]}.
    """

    samples: BatchRef
    rewards: Tensor  # [N]
    mask: Tensor  # bool [T]
    components: dict[str, Tensor]  # name -> [N]
    baselines: Tensor | None  # [N] reward of the greedy completion of the sample's prompt


def write_advantages(
    store: Store, chosen: Chosen, algorithm: AlgorithmConfig, out_key: str, version: int
) -> tuple[BatchRef, dict[str, float]]:
    """The samples with advantages, mask, and what else the update needs; the method's metrics.

    version: the policy version that trains on them.
    """
    samples = chosen.samples
    offsets = jagged(store, samples, "response_mask")[1]
    rows = Rows.of_offsets(torch.from_numpy(offsets.copy()))
    mismatch = _mismatch(store, chosen, rows)
    batch = _estimator_batch(store, chosen, rows, _path_weights(mismatch, algorithm))
    result = advantages_of(batch, algorithm)
    advantages = result.advantages.float()
    columns: dict[str, Tensor] = {"advantages": advantages, "response_mask": chosen.mask.byte()}
    metrics = {**result.metrics.values(), **_summary(advantages[chosen.mask])}
    if batch.values is not None and result.returns is not None:
        columns["returns"] = result.returns.float()
        metrics["explained_variance"] = explained_variance(batch, result.returns)
    metrics = {f"advantage/{name}": value for name, value in metrics.items()}
    if mismatch is not None and algorithm.ratio_against == "old_logprobs":
        mismatch = replace(mismatch, advantages=advantages)
        steps = corrections_of(algorithm)
        gap = correction_metrics(mismatch, steps)
        metrics |= {f"correction/{name}": value for name, value in gap.items()}
        if steps:
            weights, kept = correct(mismatch, steps)
            columns |= {"correction_weights": weights.float(), "correction_kept": kept.byte()}
    stored: dict[str, object] = {
        name: Jagged(values.numpy(), offsets) for name, values in columns.items()
    }
    if chosen.baselines is not None:
        stored["baseline_reward"] = chosen.baselines.float().numpy()
    if algorithm.proximal == "loglinear":
        spans = jagged(store, samples, "weight_spans")
        stored["staleness"] = Jagged(token_staleness(*spans, offsets, version), offsets)
    written = write_batch(store, out_key, stored)
    return samples.drop(["response_mask"]).with_columns(written), metrics


def _estimator_batch(
    store: Store, chosen: Chosen, rows: Rows, weights: Tensor | None
) -> AdvantageBatch:
    samples = chosen.samples
    groups = numbers(store, samples, "group_id")
    # A response is one turn unless the samples say otherwise, and its state is its prompt.
    steps = tokens(store, samples, "turn_ids")
    states = tokens(store, samples, "turn_states")
    if states is None:
        state = "state_id" if "state_id" in samples.names else "group_id"
        states = numbers(store, samples, state)[rows.ids]
    return AdvantageBatch(
        rows=rows,
        mask=chosen.mask,
        rewards=chosen.rewards,
        groups=groups,
        token_rewards=None,
        values=tokens(store, samples, "values"),
        logprobs=tokens(store, samples, "old_logprobs"),
        ref_logprobs=tokens(store, samples, "ref_logprobs"),
        sum_pi_squared=tokens(store, samples, "sum_pi_squared"),
        correction_weights=weights,
        baselines=chosen.baselines,
        steps=torch.zeros_like(states) if steps is None else steps,
        states=states,
        components=chosen.components,
    )


def _mismatch(store: Store, chosen: Chosen, rows: Rows) -> Mismatch | None:
    """The two policies' log-probs, where both are stored."""
    ours = tokens(store, chosen.samples, "old_logprobs")
    theirs = tokens(store, chosen.samples, "rollout_logprobs")
    if ours is None or theirs is None:
        return None
    return Mismatch(rows=rows, mask=chosen.mask, logprobs=ours, rollout_logprobs=theirs)


def _path_weights(mismatch: Mismatch | None, algorithm: AlgorithmConfig) -> Tensor | None:
    """The importance weights that the optimal token baseline takes into account [T]."""
    steps = [
        step
        for step, config in zip(corrections_of(algorithm), algorithm.correction, strict=True)
        if isinstance(config, WeightCorrection)
    ]
    if mismatch is None or not steps or algorithm.ratio_against != "old_logprobs":
        return None
    return correct(mismatch, steps)[0]


def _summary(advantages: Tensor) -> dict[str, float]:
    """Mean, deviation and extremes over the tokens with mask 1; {} without one."""
    if not advantages.numel():
        return {}
    return {
        "mean": float(advantages.mean()),
        "std": float(advantages.std(correction=0)),
        "max": float(advantages.max()),
        "min": float(advantages.min()),
    }


def explained_variance(batch: AdvantageBatch, returns: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over the tokens with mask 1; 0 where the returns are all equal.

    Args:
        batch: with the critic's values V [T] and the mask [T].
        returns: R [T].
    """
    assert batch.values is not None
    found = returns[batch.mask].double()
    if found.numel() < 2 or not float(found.var()):
        return 0.0
    return float(1 - (found - batch.values[batch.mask]).var() / found.var())


def tokens(store: Store, samples: BatchRef, column: str) -> Tensor | None:
    """A jagged column's values [T], or None where the batch has no such column."""
    if column not in samples.names:
        return None
    return torch.from_numpy(np.array(jagged(store, samples, column)[0]))


def numbers(store: Store, samples: BatchRef, column: str) -> Tensor:
    """A column with one number a row, [N]."""
    return torch.from_numpy(np.array(dense(store, samples, column)))


def components(store: Store, samples: BatchRef) -> dict[str, Tensor]:
    """What each reward function gave, by its name [N]; NaN where it had nothing to say."""
    names = [name for name in samples.names if name.startswith(SCORE)]
    return {name.removeprefix(SCORE): numbers(store, samples, name) for name in names}


def dense(store: Store, samples: BatchRef, column: str) -> NDArray[Any]:
    """As `numbers`, in numpy."""
    return samples.fetch_numpy(store, column)[0]


def jagged(store: Store, samples: BatchRef, column: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """A jagged column: values [T] and offsets [N + 1]."""
    values, offsets = samples.fetch_numpy(store, column)
    assert offsets is not None, column
    return values, offsets
