"""Figures of a step's samples, as a person reads them on a curve."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def sample_metrics(
    *,
    rewards: NDArray[np.float32],
    components: dict[str, NDArray[np.float32]],
    failed: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    lengths: NDArray[np.int64],
    groups: NDArray[np.int64],
) -> dict[str, float]:
    """Reward, length and group figures of all samples of a step, failed ones left out.

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
    figures = {
        "samples/total": float(len(rewards)),
        "samples/failed": float(failed.sum()),
        "response/tokens_mean": float(lengths.mean()),
        "response/tokens_max": float(lengths.max()),
        "response/truncated_fraction": float(truncated.mean()),
    }
    if not good.any():
        return figures
    scores, ids = rewards[good], groups[good]
    _, index = np.unique(ids, return_inverse=True)
    count = np.bincount(index)
    mean = np.bincount(index, scores) / count
    spread = np.sqrt(np.bincount(index, (scores - mean[index]) ** 2) / count)
    figures |= {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std()),
        "reward/min": float(scores.min()),
        "reward/max": float(scores.max()),
        "reward/group_std": float(spread.mean()),
        "groups/without_variance": float((spread == 0).mean()),
    }
    for name, component in components.items():
        figures[f"reward/{name}"] = float(component[good].mean())
    return figures
