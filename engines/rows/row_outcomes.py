"""What became of the rows of the data that a step sampled, by numbers of its samples alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engines.data.column_reading import dense, policy_tokens
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.objects.store import Store
from storage.rows.row_history import RowOutcomes


def row_outcomes(store: Store, prompts: BatchRef, samples: BatchRef) -> RowOutcomes:
    """Of each group that a step sampled, in the order of its prompts.

    Args:
        store: of the batches.
        prompts: group_id and prompt_row of the step's prompts, those carried to it among them.
        samples: [N], scored.
    """
    samples = samples.of_policy(store)
    groups, rows = (dense(store, prompts, name) for name in ("group_id", "prompt_row"))
    member = dense(store, samples, "group_id")
    sampled = np.isin(groups, member)
    groups, rows = groups[sampled], rows[sampled]
    order = np.argsort(groups, kind="stable")
    at = order[np.searchsorted(groups, member, sorter=order)]  # [N], the place of its group
    failed = dense(store, samples, "status") == SampleStatus.FAILED
    rewards = dense(store, samples, "reward").astype(np.float64)
    seconds = np.full(len(member), np.nan)
    if "env_seconds" in samples.names:
        seconds = dense(store, samples, "env_seconds").astype(np.float64)
    own = samples.own_groups(store)
    varied = _varied(own[~failed], rewards[~failed])
    count = len(groups)
    return RowOutcomes(
        row=rows.astype(np.int64),
        reward=_means(at[~failed], rewards[~failed], count),
        failed=np.bincount(at[failed], minlength=count) > 0,
        uniform=np.bincount(at[np.isin(own, varied)], minlength=count) == 0,
        tokens=_means(at, policy_tokens(store, samples).astype(np.float64), count),
        seconds=_means(at, seconds, count),
    )


def _varied(groups: NDArray[np.int64], rewards: NDArray[np.float64]) -> NDArray[np.int64]:
    """Groups whose rewards are not all equal."""
    known, member = np.unique(groups, return_inverse=True)
    least, most = np.full(len(known), np.inf), np.full(len(known), -np.inf)
    np.minimum.at(least, member, rewards)
    np.maximum.at(most, member, rewards)
    return known[least < most]


def _means(
    member: NDArray[np.int64], values: NDArray[np.float64], count: int
) -> NDArray[np.float64]:
    """[count]: means of the values of each; not a number where there is none."""
    sums = np.bincount(member, values, minlength=count)
    numbers = np.bincount(member, minlength=count)
    return np.where(numbers > 0, sums / np.maximum(numbers, 1), np.nan)
