"""Figures of a step's samples, as a person reads them on a curve."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.algorithms.groups import Groups


def sample_metrics(
    *,
    rewards: NDArray[np.float32],
    components: dict[str, NDArray[np.float32]],
    failed: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    lengths: NDArray[np.int64],
    groups: NDArray[np.int64],
) -> dict[str, float]:
    """Reward, length and group metrics of all samples of a step, failed ones left out.

    Args:
        rewards: [N], the weighted sums; not a number where failed.
        components: name -> [N], what each reward function gave.
        failed: [N], scoring failed.
        truncated: [N], ended by the limit of new tokens.
        lengths: [N], response tokens.
        groups: [N], samples of one prompt share a number.

    Each mean's denominator is the number of samples that did not fail; of groups, those with at
    least one such sample.
    """
    good = ~failed
    metrics = {
        "samples/total": float(len(rewards)),
        "samples/failed": float(failed.sum()),
        "response/tokens_mean": float(lengths.mean()),
        "response/tokens_max": float(lengths.max()),
        "response/truncated_fraction": float(truncated.mean()),
    }
    if not good.any():
        return metrics
    scores, ids = rewards[good], groups[good]
    _, index = np.unique(ids, return_inverse=True)
    count = np.bincount(index)
    mean = np.bincount(index, scores) / count
    spread = np.sqrt(np.bincount(index, (scores - mean[index]) ** 2) / count)
    metrics |= {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std()),
        "reward/min": float(scores.min()),
        "reward/max": float(scores.max()),
        "reward/group_std": float(spread.mean()),
        "groups/without_variance": float((spread == 0).mean()),
    }
    for name, component in components.items():
        metrics[f"reward/{name}"] = float(component[good].mean())
    return metrics


def reward_metrics(
    rewards: Tensor, groups: Tensor, components: Mapping[str, Tensor]
) -> dict[str, float]:
    """Mean and deviation (divisor n - 1) of the rewards [N] and components [N], NaN left out.

    group_std is the mean over the groups of their deviations, zero_std_groups the share of groups
    whose rewards are all equal.
    """
    group = Groups.of(groups, ~rewards.isnan())
    counted = group.sizes > 0
    metrics = {
        "group_std": group.deviation(rewards)[counted].mean(),
        "zero_std_groups": group.uniform(rewards)[counted].double().mean(),
    }
    for name, component in {"reward": rewards, **components}.items():
        whole = Groups.of(torch.zeros_like(groups), ~component.isnan())
        metrics[f"{name}_mean"] = component.nanmean()
        metrics[f"{name}_std"] = whole.deviation(component).squeeze(0)
    return {name: float(value) for name, value in metrics.items()}
