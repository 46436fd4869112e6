"""What becomes of a group when the scoring of a sample failed: rewards.on_failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np


class RewardsFailed(RuntimeError):
    """Scoring failed for some sample, and rewards.on_failure = abort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """Which samples go on after failures of scoring; N samples in groups."""

    keep: np.ndarray  # bool [N]
    samples_dropped: dict[str, int]  # reason -> samples: reward_failed, or group_incomplete
    groups_dropped: int  # groups with no sample left


def resolve_failures(
    group_ids: np.ndarray, failed: np.ndarray, policy: Literal["drop", "complete", "abort"]
) -> Resolution:
    """Apply rewards.on_failure to samples with `group_ids` int64 [N] and `failed` bool [N].

    drop leaves out each group with a failed sample; complete leaves out failed samples only, and a
    group of which one sample or none is left (its advantage would say nothing); abort raises
    RewardsFailed if any sample failed.
    """
    groups, member = np.unique(group_ids, return_inverse=True)
    if policy == "abort" and failed.any():
        touched = len(np.unique(member[failed]))
        raise RewardsFailed(
            f"Scoring failed for {int(failed.sum())} of {len(failed)} samples, in {touched} of "
            f"{len(groups)} groups, and rewards.on_failure is abort."
        )
    sizes = np.bincount(member, minlength=len(groups))
    left = sizes - np.bincount(member, weights=failed, minlength=len(groups)).astype(np.int64)
    whole = left == sizes
    kept_groups = whole if policy == "drop" else whole | (left > 1)
    keep = kept_groups[member] & ~failed
    return Resolution(
        keep=keep,
        samples_dropped={
            "reward_failed": int(failed.sum()),
            "group_incomplete": int((~keep & ~failed).sum()),
        },
        groups_dropped=int((~kept_groups).sum()),
    )
