"""Rewards for progress over all episodes of a step, from their stored embeddings.

One call for the whole step: so they are the same however its episodes lay in shards and on workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from configs.srpo import ProgressConfig
from engines.algorithms.progress_rewards import ProgressRewards, progress_rewards
from engines.data.contract import SampleFailure
from engines.encoders.contract import ProgressResult, ProgressScorer
from engines.workers.engine import StoreSpec
from storage.batches.columns import EXTRA, SCORE, SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.runs.run_store import DATA_SUFFIX

NAME = "progress"  # of the score, as reward functions have names
MEASURED = f"{EXTRA}{NAME}/measured"  # task, encoder, cluster and distance, as JSON


class ProgressEngine(ProgressScorer):
    """Makes rewards for progress out of stored embeddings."""

    def __init__(self, spec: StoreSpec) -> None:
        self._store = spec.open_store()

    def progress(
        self, prompts: BatchRef, samples: BatchRef, settings: ProgressConfig, out_key: str
    ) -> ProgressResult:
        """Replace the rewards of a step's samples by those for progress (`measure`)."""
        return measure(self._store, prompts, samples, settings, out_key)


def measure(
    store: Store, prompts: BatchRef, samples: BatchRef, settings: ProgressConfig, out_key: str
) -> ProgressResult:
    """Write the rewards of N episodes for progress, and the clusters that they were measured by.

    Args:
        store: of the batches.
        prompts: of all samples, with their rows.
        samples: [N] scored, with embeddings. One without an embedding is failed: it is neither a
            success nor a failure, and has no reward.
        settings: which tasks there are, and what is a success.
        out_key: of the rewards; the clusters' is beside it.
    """
    read: list[NDArray[Any]] = [
        samples.fetch_numpy(store, name)[0]
        for name in ("status", "sample_id", "reward", "embedding")
    ]
    status, ids, rewards_given, points = read
    encoders = [str(text) for text in samples.fetch_list(store, "encoder")]
    errors = [str(text) for text in samples.fetch_list(store, "embedding_error")]
    names, tasks = tasks_of(store, prompts, samples, settings.task_column)
    failed = status == SampleStatus.FAILED
    missing = ~np.isfinite(points).all(1)
    numbers = np.flatnonzero(~(failed | missing))
    numbers = numbers[
        np.argsort(ids[numbers], kind="stable")
    ]  # so that no sum depends on the rows' order
    result = progress_rewards(
        points[numbers],
        rewards_given[numbers] >= settings.success,
        tasks[numbers],
        **settings.model_dump(exclude={"task_column", "success"}),
    )
    if len({encoders[row] for row in numbers.tolist()}) > 1:
        raise RuntimeError(
            "The episodes of this step were embedded by encoders that differ, so their distances "
            "mean nothing. The workers of cluster.roles.encoder need the same model and libraries."
        )
    rewards = np.full(len(samples), np.nan, np.float32)
    rewards[numbers] = result.rewards
    measured: list[dict[str, object] | None] = [None] * len(samples)
    for place, row in enumerate(numbers.tolist()):
        measured[row] = {"task": names[tasks[row]], "encoder": encoders[row]}
        if (nearest := int(result.nearest[place])) >= 0:
            measured[row] |= {"cluster": nearest, "distance": float(result.distances[place])}
    columns: dict[str, object] = {
        "reward": rewards,
        "status": np.where(missing, np.int64(SampleStatus.FAILED), status),
        f"{SCORE}{NAME}": rewards,
        MEASURED: measured,
    }
    clusters = None
    if result.clusters:
        beside = f"{out_key.removesuffix(DATA_SUFFIX)}-clusters{DATA_SUFFIX}"
        encoder = encoders[int(numbers[0])]
        clusters = write_batch(store, beside, cluster_columns(result, names, ids[numbers], encoder))
    return ProgressResult(
        ref=write_batch(store, out_key, columns),
        clusters=clusters,
        failures=tuple(
            SampleFailure(sample=int(ids[row]), function=NAME, error=errors[row])
            for row in np.flatnonzero(missing & ~failed).tolist()
        ),
        metrics=metrics_of(result, rewards_given[numbers] >= settings.success),
    )


def tasks_of(
    store: Store, prompts: BatchRef, samples: BatchRef, column: str | None
) -> tuple[list[str], NDArray[np.int64]]:
    """The names of the tasks, in their alphabet's order, and the number of each sample's [N].

    Raises ValueError for a row that does not name one.
    """
    if column is None:
        return [""], np.zeros(len(samples), np.int64)
    groups = prompts.fetch_numpy(store, "group_id")[0].tolist()
    rows = cast("list[Mapping[str, Any]]", prompts.fetch_list(store, "row"))
    by_group = {}
    for group, row in zip(groups, rows, strict=True):
        if not isinstance(row.get(column), str | int):
            raise ValueError(
                f"progress.task_column = {column} names the column with a row's task, and a row has "
                f"{row.get(column)!r} there. Set it to a column with a text or a whole number in "
                "each row, or to null for one task."
            )
        by_group[group] = str(row[column])
    names = sorted(set(by_group.values()))
    number = {name: place for place, name in enumerate(names)}
    own = samples.fetch_numpy(store, "group_id")[0].tolist()
    return names, np.array([number[by_group[group]] for group in own], np.int64)


def cluster_columns(
    result: ProgressRewards, names: list[str], ids: NDArray[np.int64], encoder: str
) -> dict[str, object]:
    """The clusters as columns; `ids`: sample_id of the episodes that were measured."""
    return {
        "task": [names[cluster.task] for cluster in result.clusters],
        "centre": np.stack([cluster.centre for cluster in result.clusters]),
        "members": [ids[cluster.members] for cluster in result.clusters],
        "encoder": [encoder] * len(result.clusters),
    }


def metrics_of(result: ProgressRewards, success: NDArray[np.bool_]) -> dict[str, float]:
    """Share of successes, clusters, and what failures got and how far they were."""
    metrics = {"progress/clusters": float(len(result.clusters))}
    if len(success):
        metrics["progress/success_rate"] = float(success.mean())
    if not success.all():
        metrics["progress/failure_reward_mean"] = float(result.rewards[~success].mean())
    if not np.isnan(result.distances).all():
        metrics["progress/distance_mean"] = float(np.nanmean(result.distances))
    return metrics
