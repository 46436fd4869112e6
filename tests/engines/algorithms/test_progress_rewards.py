"""Rewards for progress: by hand, and what they must not depend on (vectors: tests/parity)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from configs.srpo import ProgressConfig
from engines.algorithms.progress_rewards import (
    ProgressRewards,
    logistic,
    progress_rewards,
    success_clusters,
)
from engines.algorithms.sample_selection import success_rate

SETTINGS = ProgressConfig().model_dump(exclude={"task_column", "success"})


def measured(points: list[list[float]], success: list[bool], tasks: list[int]) -> ProgressRewards:
    return progress_rewards(
        np.array(points, np.float32), np.array(success), np.array(tasks, np.int64), **SETTINGS
    )


def test_by_hand() -> None:
    found = measured([[1.0], [2.0], [3.0], [5.0]], [True, False, False, False], [4] * 4)
    share = [0.0, 1 / 3, 1.0]
    wanted = [0.6 / (1 + math.exp(-10 * (0.5 - one))) for one in share]
    assert found.rewards.tolist() == pytest.approx([1.0, *wanted])
    assert found.distances[1:].tolist() == [1.0, 2.0, 4.0] and np.isnan(found.distances[0])
    assert found.nearest.tolist() == [-1, 0, 0, 0]
    (cluster,) = found.clusters
    assert (cluster.task, cluster.members.tolist(), cluster.centre.tolist()) == (4, [0], [1.0])


def test_a_success_that_stands_alone_is_no_centre_beside_a_cluster() -> None:
    points = [[0.0], [0.1], [9.0], [9.5], [8.0], [1.0]]
    success = [True, True, True, False, False, False]
    found = measured(points, success, [0] * 6)
    (cluster,) = found.clusters
    assert cluster.members.tolist() == [0, 1] and cluster.centre[0] == pytest.approx(0.05)
    assert found.rewards[5] > found.rewards[4] > found.rewards[3], "by the way to 0.05"


def test_tasks_know_nothing_of_each_other() -> None:
    points = [[0.0], [1.0], [2.0], [50.0], [51.0], [53.0], [3.0]]
    success = [True, False, False, True, False, False, False]
    tasks = [0, 0, 0, 1, 1, 1, 2]
    together = measured(points, success, tasks)
    for task in range(3):
        own = [row for row, one in enumerate(tasks) if one == task]
        alone = measured([points[i] for i in own], [success[i] for i in own], [task] * len(own))
        assert together.rewards[own].tolist() == alone.rewards.tolist()
    assert together.rewards[6] == 0 and together.nearest[6] == -1, "a task without success"
    assert [one.task for one in together.clusters] == [0, 1]


def test_the_order_of_the_rows_does_not_count() -> None:
    random = np.random.RandomState(0)
    points, success = random.randn(40, 3), random.rand(40) < 0.4
    tasks = random.randint(0, 3, 40)
    first = progress_rewards(points, success, tasks, **SETTINGS)
    for seed in range(5):
        order = np.random.RandomState(seed).permutation(40)
        other = progress_rewards(points[order], success[order], tasks[order], **SETTINGS)
        np.testing.assert_allclose(other.rewards, first.rewards[order], rtol=1e-12)


def test_none_one_and_equal() -> None:
    empty = progress_rewards(np.empty((0, 2)), np.empty(0, bool), np.empty(0, np.int64), **SETTINGS)
    assert empty.rewards.tolist() == [] and empty.clusters == ()
    assert measured([[7.0]], [True], [0]).rewards.tolist() == [1.0]
    assert measured([[7.0]], [False], [0]).rewards.tolist() == [0.0]
    equal = measured([[0.0], [1.0], [-1.0]], [True, False, False], [0, 0, 0])
    assert equal.rewards.tolist() == pytest.approx([1.0, 0.3, 0.3])


def test_equal_successes_are_one_cluster_and_numbers_that_do_not_vary_do_not_count() -> None:
    same = success_clusters(np.array([[3.0, 1.0]] * 4), 0.5, 2)
    assert [one.tolist() for one in same] == [[0, 1, 2, 3]]
    far = success_clusters(np.array([[0.0], [1.0], [50.0]]), 0.01, 2)
    assert [one.tolist() for one in far] == [[0, 1, 2]], "no cluster: all are one"


def test_the_logistic_function_does_not_overflow() -> None:
    with np.errstate(over="raise"):
        assert logistic(np.array([-1e4, 0.0, 1e4])).tolist() == [0.0, 0.5, 1.0]


def test_groups_are_kept_by_their_share_of_successes() -> None:
    rewards = torch.tensor([1.0] + [0.5] * 9 + [0.6] * 10 + [1.0] * 9 + [0.0] + [1.0] * 10)
    groups = torch.arange(4).repeat_interleave(10)
    keep = success_rate(rewards, groups, low=0.1, high=0.9, success=1.0)
    assert keep.reshape(4, 10).all(1).tolist() == [True, False, True, False]
    assert keep.reshape(4, 10).any(1).tolist() == [True, False, True, False]
