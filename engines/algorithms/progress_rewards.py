"""Progress rewards: what a failed episode is worth, by how near it came to successful ones.

SRPO, arXiv:2511.15605, in the form of siiRL (`compute_embodied_reward`). On whole batches of N
episodes with embeddings of D numbers; everything in float64. The order of the episodes decides only
how clusters are numbered, with min_samples = 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SMALLEST_RANGE = 1e-6  # of the distances; below it all failures are equally far


@dataclass(frozen=True, kw_only=True, slots=True)
class SuccessCluster:
    """Successes of a task that are alike."""

    task: int  # its number
    members: NDArray[np.int64]  # [M] numbers of the episodes
    centre: NDArray[np.float64]  # [D] mean of their embeddings


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressRewards:
    """The rewards of N episodes.

    One task, embeddings 1, 2, 3, 5 of which the first succeeded: one cluster with its centre at 1,
    distances NaN, 1, 2, 4, rewards 1, 0.596, 0.505, 0.004.
    """

    rewards: NDArray[np.float64]  # [N]
    distances: NDArray[np.float64]  # [N] to the nearest centre; NaN of what was not measured
    nearest: NDArray[np.int64]  # [N] number of that cluster; -1 of what was not measured
    clusters: tuple[SuccessCluster, ...]


def progress_rewards(
    embeddings: NDArray[np.floating],
    success: NDArray[np.bool_],
    tasks: NDArray[np.int64],
    *,
    eps: float,
    min_samples: int,
    ceiling: float,
    steepness: float,
    middle: float,
) -> ProgressRewards:
    """1 for a success; ceiling * sigmoid(steepness (middle - d')) for a failure.

    d' = (d - min d) / (max d - min d) over the failures of the task, with d the Euclidean distance
    to the nearest centre of a cluster of its successes; 1/2 where the range is below 1e-6. 0 where
    the task has no success.

    Args:
        embeddings: [N, D].
        success: [N].
        tasks: [N], equal for episodes that are compared.
        eps: of `success_clusters`.
        min_samples: of `success_clusters`.
        ceiling: bound on the reward of a failure.
        steepness: of the logistic curve.
        middle: d' at which a failure gets half of the ceiling.
    """
    points = embeddings.astype(np.float64)
    rewards = success.astype(np.float64)
    distances = np.full(len(points), np.nan)
    nearest = np.full(len(points), -1, np.int64)
    clusters: list[SuccessCluster] = []
    for task in np.unique(tasks).tolist():
        won, lost = (np.flatnonzero((tasks == task) & outcome) for outcome in (success, ~success))
        if not len(won):
            continue
        of_task = [
            SuccessCluster(task=task, members=won[members], centre=points[won[members]].mean(0))
            for members in success_clusters(points[won], eps, min_samples)
        ]
        if len(lost):
            each = np.stack(
                [np.linalg.norm(points[lost] - cluster.centre, axis=1) for cluster in of_task]
            )
            distances[lost] = each.min(0)
            nearest[lost] = len(clusters) + each.argmin(0)
            scaled = scaled_distances(distances[lost])
            rewards[lost] = ceiling * logistic(steepness * (middle - scaled))
        clusters += of_task
    return ProgressRewards(
        rewards=rewards, distances=distances, nearest=nearest, clusters=tuple(clusters)
    )


def success_clusters(
    points: NDArray[np.float64], eps: float, min_samples: int
) -> list[NDArray[np.int64]]:
    """The members of each cluster of M successes [M, D], in increasing order.

    DBSCAN (Ester et al. 1996) on points whose D numbers have each mean 0 and deviation 1 (divisor
    M). Those that it leaves alone are in none; where it finds no cluster, all are one.
    """
    from sklearn.cluster import DBSCAN
    from sklearn.preprocessing import StandardScaler

    scaled = StandardScaler().fit_transform(points)
    labels = DBSCAN(eps=eps, min_samples=min_samples).fit(scaled).labels_
    members = [np.flatnonzero(labels == label) for label in range(int(labels.max(initial=-1)) + 1)]
    return members or [np.arange(len(points))]


def scaled_distances(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """[M] distances from 0, the nearest, to 1, the farthest; 1/2 where they hardly differ."""
    least, most = distances.min(), distances.max()
    if most - least < SMALLEST_RANGE:
        return np.full_like(distances, 0.5)
    return (distances - least) / (most - least)


def logistic(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 / (1 + exp(-x)), of any number without overflow."""
    small = np.exp(-np.abs(numbers))
    return np.where(numbers >= 0, 1.0, small) / (1.0 + small)
