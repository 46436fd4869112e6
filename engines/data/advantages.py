"""Columns in, columns out: an estimator's inputs from a stored batch, its advantages into another.

What comes out, with the corrections for the rollout engine's log-probs, is written as columns, so
that the update, and a replay of it, computes nothing but the loss. Which samples train is decided
before (training_batch.py); of a large step, parts are written one by one (advantage_parts.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.algorithm.algorithm import AlgorithmConfig
from configs.algorithm.corrections import WeightCorrection
from engines.algorithms.aggregation import Rows
from engines.algorithms.from_config import advantages_of, corrections_of, fields_of, with_teacher
from engines.algorithms.inputs import AdvantageBatch, Advantages, Paths
from engines.algorithms.reward_shaping import without_truncated
from engines.algorithms.rollout_correction import Mismatch, Step, correct, correction_metrics
from engines.data.column_reading import jagged, numbers, tokens
from engines.data.contract import join_columns
from storage.batches.columns import TASK
from storage.batches.refs import BatchRef
from storage.batches.writing import Jagged, write_batch
from storage.objects.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSamples:
    """The samples that train, after shaping and selection.

    Two samples: rewards [1.0, 0.0], masked [False, False], components {"math": [1.0, 0.0]}.
    """

    samples: BatchRef
    rewards: Tensor  # [N]
    masked: Tensor  # bool [N]; cut off, and its tokens are to have no part in the loss
    components: dict[str, Tensor]  # name -> [N]
    baselines: Tensor | None  # [N] reward of the greedy completion of the sample's prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The estimator's inputs and its result, of samples as they are stored."""

    batch: AdvantageBatch
    mismatch: Mismatch | None  # with the advantages; None: corrections are not made here
    steps: tuple[Step, ...]  # the corrections
    result: Advantages  # [T]

    @classmethod
    def of(
        cls,
        batch: AdvantageBatch,
        mismatch: Mismatch | None,
        steps: tuple[Step, ...],
        result: Advantages,
    ) -> Estimate:
        """With what the corrections are given."""
        if result.mask is not None:
            batch = replace(batch, mask=result.mask)
        if mismatch is not None:
            mismatch = replace(mismatch, advantages=result.advantages.float())
        return cls(batch=batch, mismatch=mismatch, steps=steps, result=result)


def write_advantages(
    store: Store, training: TrainingSamples, algorithm: AlgorithmConfig, out_key: str, version: int
) -> tuple[BatchRef, dict[str, float]]:
    """The samples with advantages, mask, and what else the update needs; the method's metrics.

    version: the policy version that trains on them.
    """
    steps = corrections_of(algorithm)
    mismatch = mismatch_of(store, training, algorithm)
    batch = estimator_batch(store, training, algorithm, mismatch, steps)
    result = branch_advantages(store, training.samples, batch, algorithm)
    result = with_teacher(result, batch, algorithm)
    estimate = Estimate.of(batch, mismatch, steps, result)
    advantages = result.advantages.float()
    metrics = {**result.metrics.values(), **_summary(advantages[estimate.batch.mask])}
    if batch.values is not None and result.returns is not None:
        metrics["explained_variance"] = explained_variance(batch, result.returns)
    metrics = {f"advantage/{name}": value for name, value in metrics.items()}
    if estimate.mismatch is not None:
        gap = correction_metrics(estimate.mismatch, steps)
        metrics |= {f"correction/{name}": value for name, value in gap.items()}
    written = write_columns(store, training, estimate, algorithm, out_key, version)
    return join_columns(training.samples, written), metrics


def branch_advantages(
    store: Store, samples: BatchRef, batch: AdvantageBatch, algorithm: AlgorithmConfig
) -> Advantages:
    """The advantages of a batch; where branches of episodes have rewards of their own, each token's
    is that of its branch, by the rewards of the same branch in the samples of the group that have it.

    Metrics are those of the episodes' rewards.
    """
    result = advantages_of(batch, algorithm)
    branches = tokens(store, samples, "branch_ids")
    if branches is None:
        return result
    more = tokens(store, samples, "branch_rewards")
    assert more is not None, "they are written together"
    advantages = result.advantages
    for branch in branches.unique():
        own = branches == branch
        rewards = torch.full_like(batch.rewards, torch.nan)
        rows = batch.rows.ids[own]
        rewards[rows] = batch.rewards[rows] + more[own].to(rewards.dtype)
        of_branch = advantages_of(replace(batch, rewards=rewards), algorithm)
        advantages = torch.where(own, of_branch.advantages, advantages)
    return replace(result, advantages=advantages)


def write_columns(
    store: Store,
    training: TrainingSamples,
    estimate: Estimate,
    algorithm: AlgorithmConfig,
    out_key: str,
    version: int,
) -> BatchRef:
    """Store the columns that the update reads, of N samples with T response tokens."""
    samples, batch, result = training.samples, estimate.batch, estimate.result
    offsets = batch.rows.offsets.numpy()
    advantages = result.advantages.float()
    columns: dict[str, Tensor] = {"advantages": advantages, "response_mask": batch.mask.byte()}
    if batch.values is not None and result.returns is not None:
        columns["returns"] = result.returns.float()
    if estimate.mismatch is not None and estimate.steps:
        weights, accepted = correct(estimate.mismatch, estimate.steps)
        columns |= {"correction_weights": weights.float(), "correction_kept": accepted.byte()}
    stored: dict[str, object] = {
        name: Jagged(values.numpy(), offsets) for name, values in columns.items()
    }
    if training.baselines is not None:
        stored["baseline_reward"] = training.baselines.float().numpy()
    if algorithm.proximal == "loglinear":
        spans = jagged(store, samples, "weight_spans")
        stored["staleness"] = Jagged(token_staleness(*spans, offsets, version), offsets)
    return write_batch(store, out_key, stored)


def corrects_before_update(samples: BatchRef, algorithm: AlgorithmConfig) -> bool:
    """Whether the corrections are made before the update, with the columns that there are."""
    needed = {"old_logprobs", "rollout_logprobs"}
    return algorithm.ratio_against == "old_logprobs" and needed <= set(samples.names)


def mismatch_of(
    store: Store, training: TrainingSamples, algorithm: AlgorithmConfig
) -> Mismatch | None:
    """The two policies' log-probs, where the corrections are made before the update."""
    samples = training.samples
    if not corrects_before_update(samples, algorithm):
        return None
    ours, theirs = (tokens(store, samples, f"{name}_logprobs") for name in ("old", "rollout"))
    assert ours is not None and theirs is not None
    rows, mask = _counting(store, training)
    return Mismatch(rows=rows, mask=mask, logprobs=ours, rollout_logprobs=theirs)


def _counting(store: Store, training: TrainingSamples) -> tuple[Rows, Tensor]:
    """The rows, and which of their tokens count, bool [T]."""
    values, offsets = jagged(store, training.samples, "response_mask")
    rows = Rows.of_offsets(torch.from_numpy(offsets.copy()))
    mask = torch.from_numpy(values.astype(bool))
    if bool(training.masked.any()):
        mask = without_truncated(mask, rows, training.masked)
    return rows, mask


def estimator_batch(
    store: Store,
    training: TrainingSamples,
    algorithm: AlgorithmConfig,
    mismatch: Mismatch | None,
    steps: Sequence[Step],
) -> AdvantageBatch:
    """What the estimator is given; columns that it does not look at are not read.

    Args:
        store: of the batches.
        training: the samples.
        algorithm: the recipe's.
        mismatch: theirs, if the corrections are made before the update.
        steps: the corrections.
    """
    samples, fields = training.samples, fields_of(algorithm)
    if mismatch is None:
        rows, mask = _counting(store, training)
        ours = tokens(store, samples, "old_logprobs") if "logprobs" in fields else None
    else:
        rows, mask, ours = mismatch.rows, mismatch.mask, mismatch.logprobs
    turns, states = _turns(store, samples, rows) if "steps" in fields else (None, None)

    def wanted(name: str) -> Tensor | None:
        return tokens(store, samples, name) if name in fields else None

    return AdvantageBatch(
        rows=rows,
        mask=mask,
        rewards=training.rewards,
        groups=torch.from_numpy(samples.own_groups(store)),
        tasks=task_numbers(store, samples),
        token_rewards=None,
        values=wanted("values"),
        logprobs=ours,
        ref_logprobs=wanted("ref_logprobs"),
        teacher_logprobs=wanted("teacher_logprobs"),
        sum_pi_squared=wanted("sum_pi_squared"),
        correction_weights=_path_weights(mismatch, algorithm, steps, fields),
        baselines=training.baselines,
        steps=turns,
        states=states,
        paths=_paths(store, samples) if "paths" in fields else None,
        components=training.components,
    )


def task_numbers(store: Store, samples: BatchRef) -> Tensor | None:
    """int64 [N]: equal for samples of one task; None where a run has one."""
    if TASK not in samples.names:
        return None
    names = [str(name) for name in samples.fetch_list(store, TASK)]
    number_of = {name: number for number, name in enumerate(sorted(set(names)))}
    return torch.tensor([number_of[name] for name in names], dtype=torch.int64)


def _turns(store: Store, samples: BatchRef, rows: Rows) -> tuple[Tensor, Tensor]:
    """Turn and state of each token, int64 [T].

    A response is one turn unless the samples say otherwise, and its state is its prompt.
    """
    steps, states = tokens(store, samples, "turn_ids"), tokens(store, samples, "turn_states")
    if states is None:
        state = "state_id" if "state_id" in samples.names else "group_id"
        states = numbers(store, samples, state)[rows.ids]
    return torch.zeros_like(states) if steps is None else steps, states


def _paths(store: Store, samples: BatchRef) -> Paths | None:
    """Where the samples lie in the trees of their prompts; None where they are of no trees."""
    if "tree_path" not in samples.names:
        return None
    nodes, offsets = jagged(store, samples, "tree_path")
    lengths, _ = jagged(store, samples, "tree_lengths")
    return Paths(
        rows=Rows.of_offsets(torch.from_numpy(offsets.copy())),
        nodes=torch.from_numpy(nodes.astype(np.int64)),
        lengths=torch.from_numpy(lengths.astype(np.int64)),
    )


def _path_weights(
    mismatch: Mismatch | None,
    algorithm: AlgorithmConfig,
    steps: Sequence[Step],
    fields: Collection[str],
) -> Tensor | None:
    """The importance weights that the optimal token baseline takes into account [T]."""
    weighing = [
        step
        for step, config in zip(steps, algorithm.correction, strict=True)
        if isinstance(config, WeightCorrection)
    ]
    if mismatch is None or not weighing or "correction_weights" not in fields:
        return None
    return correct(mismatch, weighing)[0]


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
    counting = returns[batch.mask].double()
    if counting.numel() < 2 or not float(counting.var()):
        return 0.0
    return float(1 - (counting - batch.values[batch.mask]).var() / counting.var())


def token_staleness(
    spans: NDArray[np.int64],
    span_offsets: NDArray[np.int64],
    offsets: NDArray[np.int64],
    version: int,
) -> NDArray[np.int32]:
    """The staleness of each response token, in versions: int32 [T]; 0 for a token of no span.

    Two samples of 3 and 1 tokens, version 6 trains; the first was begun by version 4:

        token_staleness([4, 0, 2, 5, 2, 3, 6, 0, 1], [0, 6, 9], [0, 3, 4], 6)  # [2, 2, 1, 0]

    Args:
        spans: weight_spans of all samples, flat triples of version, start, stop.
        span_offsets: int64 [N + 1], where those of each sample begin.
        offsets: int64 [N + 1], where the response tokens of each sample begin; T is the last.
        version: the version that trains.
    """
    staleness = np.zeros(int(offsets[-1]), dtype=np.int32)
    triples = np.asarray(spans, dtype=np.int64).reshape(-1, 3)
    owners = np.repeat(np.arange(len(offsets) - 1), np.diff(span_offsets) // 3)
    begins = np.asarray(offsets)[owners]
    for (wrote, start, stop), begin in zip(triples.tolist(), begins.tolist(), strict=True):
        staleness[begin + start : begin + stop] = version - wrote
    return staleness
