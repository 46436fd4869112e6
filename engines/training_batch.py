"""From scored samples to the batch that trains: failures, shaping, selection, advantages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from configs.algorithm import AlgorithmConfig
from configs.rewards import RewardsConfig
from engines.advantage_batch import AdvantageBatch
from engines.advantages import estimate
from engines.batch_metrics import sample_metrics
from engines.jagged import Rows
from engines.preparation import select, shape
from engines.rewards import resolve_failures
from storage.batches import Jagged, write_batch
from storage.columns import Status
from storage.refs import BatchRef
from storage.store import Store

SCORE = "score/"  # prefix of the columns with each reward function's own score


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBatch:
    """The samples of a step that train."""

    ref: BatchRef  # the kept samples with advantages
    trained: int  # groups of which a sample is kept
    filtered: int  # groups left out by the algorithm's selection
    dropped: dict[str, int]  # groups left out for a failure, by reason
    metrics: dict[str, float] = field(default_factory=dict)


class NothingToTrain(RuntimeError):
    """No sample of a step is left for the update."""


def training_batch(
    store: Store,
    samples: BatchRef,
    algorithm: AlgorithmConfig,
    on_failure: RewardsConfig,
    max_new_tokens: int,
    out_key: str,
) -> TrainingBatch:
    """Choose the samples that train and write their advantages.

    Raises RewardsFailed (rewards.on_failure = abort) or NothingToTrain.
    """
    groups, status = dense(store, samples, "group_id"), dense(store, samples, "status")
    failed = status == Status.FAILED
    whole = np.flatnonzero(resolve_failures(groups, failed, on_failure.on_failure).keep)
    metrics = figures(store, samples, groups, status)
    dropped = len(np.unique(groups)) - len(np.unique(groups[whole]))
    shaped = shaped_samples(store, samples.take(whole), algorithm, max_new_tokens)
    metrics |= shaped.metrics
    kept = np.flatnonzero(
        select(shaped.rewards, torch.from_numpy(groups[whole]), algorithm.selection).numpy()
    )
    if not len(kept):
        raise NothingToTrain(
            f"Of {len(groups)} samples, scoring failed for {int(failed.sum())}, and "
            "algorithm.selection leaves none of the others. Look at the log of the reward tasks, "
            "or set algorithm.selection = []."
        )
    index = whole[kept]
    ref, advantages = with_advantages(store, samples.take(index), shaped, kept, algorithm, out_key)
    trained = len(np.unique(groups[index]))
    return TrainingBatch(
        ref=ref,
        trained=trained,
        filtered=len(np.unique(groups[whole])) - trained,
        dropped={"reward_failed": dropped} if dropped else {},
        metrics=metrics | {f"advantage/{name}": value for name, value in advantages.items()},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapedSamples:
    """Samples after shaping, response tokens only."""

    rewards: torch.Tensor  # [N]
    masks: list[torch.Tensor]  # bool [tokens] of each sample
    metrics: dict[str, float]


def shaped_samples(
    store: Store, samples: BatchRef, algorithm: AlgorithmConfig, max_new_tokens: int
) -> ShapedSamples:
    """Apply the recipe's penalties and its rule for truncated samples."""
    mask, offsets = jagged(store, samples, "response_mask")
    ids, _ = jagged(store, samples, "response_ids")
    rows = Rows.of_offsets(torch.from_numpy(np.array(offsets)))
    shaped = shape(
        torch.from_numpy(np.array(dense(store, samples, "reward"))),
        torch.from_numpy(np.array(dense(store, samples, "group_id"))),
        torch.from_numpy(np.array(ids)),
        rows,
        torch.from_numpy(mask.astype(bool)),
        torch.from_numpy(dense(store, samples, "status") == Status.TRUNCATED),
        algorithm.shaping,
        max_new_tokens,
    )
    return ShapedSamples(
        rewards=shaped.rewards,
        masks=list(shaped.mask.split(rows.lengths.tolist())),
        metrics={f"shaping/{name}": value for name, value in shaped.metrics.values().items()},
    )


def with_advantages(
    store: Store,
    samples: BatchRef,
    shaped: ShapedSamples,
    kept: NDArray[np.int64],
    algorithm: AlgorithmConfig,
    out_key: str,
) -> tuple[BatchRef, dict[str, float]]:
    """The samples with advantages, and returns where the method has them; the method's figures."""
    _, offsets = jagged(store, samples, "response_mask")
    mask = torch.cat([shaped.masks[position] for position in kept.tolist()])
    batch = AdvantageBatch(
        rows=Rows.of_offsets(torch.from_numpy(np.array(offsets))),
        mask=mask,
        rewards=shaped.rewards[torch.from_numpy(kept)],
        groups=torch.from_numpy(np.array(dense(store, samples, "group_id"))),
        components={
            name.removeprefix(SCORE): torch.from_numpy(np.nan_to_num(dense(store, samples, name)))
            for name in samples.names
            if name.startswith(SCORE)
        },
        logprobs=tokens(store, samples, "old_logprobs"),
        ref_logprobs=tokens(store, samples, "ref_logprobs"),
    )
    result = estimate(batch, algorithm)
    columns: dict[str, object] = {
        "advantages": Jagged(result.advantages.float().numpy(), offsets),
        "response_mask": Jagged(mask.to(torch.uint8).numpy(), offsets),
    }
    if result.returns is not None:
        columns["returns"] = Jagged(result.returns.float().numpy(), offsets)
    written = write_batch(store, out_key, columns)
    return samples.drop(["response_mask"]).with_columns(written), result.metrics.values()


def figures(
    store: Store, samples: BatchRef, groups: NDArray[np.int64], status: NDArray[np.int64]
) -> dict[str, float]:
    """Reward and length figures of all samples, before anything is left out but failures."""
    return sample_metrics(
        rewards=dense(store, samples, "reward"),
        components={
            name.removeprefix(SCORE): dense(store, samples, name)
            for name in samples.names
            if name.startswith(SCORE)
        },
        failed=status == Status.FAILED,
        truncated=status == Status.TRUNCATED,
        lengths=samples.lengths(store, "response_ids"),
        groups=groups,
    )


def tokens(store: Store, samples: BatchRef, column: str) -> torch.Tensor | None:
    """A jagged column's values [T], or None where the batch has no such column."""
    if column not in samples.names:
        return None
    return torch.from_numpy(np.array(jagged(store, samples, column)[0]))


def dense(store: Store, samples: BatchRef, column: str) -> NDArray[Any]:
    """A column with one number a row, [N]."""
    return samples.fetch_numpy(store, column)[0]


def jagged(store: Store, samples: BatchRef, column: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """A jagged column: values [T] and offsets [N + 1]."""
    values, offsets = samples.fetch_numpy(store, column)
    assert offsets is not None, column
    return values, offsets
