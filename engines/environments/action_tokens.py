"""Action tokens: continuous actions as the last tokens of a vocabulary, as OpenVLA writes them.

Each number of an action is scaled to [-1, 1] by statistics of the data that the policy was trained
with, and put into one of 256 bins; a bin is a token, the last one of the vocabulary the first bin
(OpenVLA, arXiv:2406.09246). `ActionTokens` is a codec for environments of gymnasium whose actions are
a Box. Runs in the process of the environments, of ours imports nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionStatistics:
    """By what actions of A numbers are scaled."""

    low: NDArray[np.float64]  # [A] 1st percentile, or minimum: what -1 stands for
    high: NDArray[np.float64]  # [A] 99th percentile, or maximum: what 1 stands for
    scaled: NDArray[np.bool_]  # [A] False where a number is as it is, as a gripper's

    @classmethod
    def read(cls, path: str | Path, name: str | None = None) -> ActionStatistics:
        """Those of a data set in dataset_statistics.json, or in a checkpoint's config.json.

        name: of the data set; None where there is one alone. ValueError for none of that name.
        """
        found: dict[str, Any] = json.loads(Path(path).read_text())
        found = found.get("norm_stats", found)
        if name is None and len(found) == 1:
            name = next(iter(found))
        if name not in found:
            raise ValueError(f"{path} has the statistics of {', '.join(found)}. Name one of them")
        return cls.of(found[name]["action"])

    @classmethod
    def of(cls, action: Mapping[str, Any]) -> ActionStatistics:
        """From the entry `action` of a data set: q01 and q99, and mask, if it has one."""
        low, high = (np.asarray(action[one], np.float64) for one in ("q01", "q99"))
        scaled = np.asarray(action.get("mask", np.ones(len(low))), bool)
        if not len(low) == len(high) == len(scaled):
            raise ValueError(
                f"q01, q99 and mask have {len(low)}, {len(high)} and {len(scaled)} numbers"
            )
        return cls(low=low, high=high, scaled=scaled)


def centres(bins: int) -> NDArray[np.float64]:
    """The numbers that the bins stand for: [bins - 1], between `bins` edges from -1 to 1.

    So OpenVLA has one bin less than tokens, and the last two of those are one bin.
    """
    edges = np.linspace(-1.0, 1.0, bins)
    return (edges[:-1] + edges[1:]) / 2.0


def actions_of(
    ids: Sequence[int], vocabulary: int, statistics: ActionStatistics, bins: int = BINS
) -> NDArray[np.float64]:
    """Token ids [n A] as actions [n, A]: 0.5 (x + 1) (high - low) + low of the bins' centres x.

    ValueError for a token that is none of the last `bins`, which OpenVLA would take for the nearest
    of them, and where the tokens are no whole actions.
    """
    numbers = vocabulary - np.asarray(ids, np.int64)  # 1 for the last token
    size = len(statistics.low)
    if not len(ids) or len(ids) % size:
        raise ValueError(f"{len(ids)} tokens are no actions of {size} each")
    if not ((numbers >= 1) & (numbers <= bins)).all():
        wrong = int(np.asarray(ids)[(numbers < 1) | (numbers > bins)][0])
        raise ValueError(f"the token {wrong} is none of the last {bins} of {vocabulary}")
    plain = centres(bins)[np.minimum(numbers - 1, bins - 2)].reshape(-1, size)
    span = statistics.high - statistics.low
    return np.where(statistics.scaled, 0.5 * (plain + 1.0) * span + statistics.low, plain)


def tokens_of(
    actions: NDArray[np.floating], vocabulary: int, statistics: ActionStatistics, bins: int = BINS
) -> list[int]:
    """Actions [n, A] as token ids [n A]: the inverse, but for the width of a bin."""
    span = np.where(statistics.high > statistics.low, statistics.high - statistics.low, 1.0)
    scaled = 2.0 * (actions - statistics.low) / span - 1.0
    plain = np.clip(np.where(statistics.scaled, scaled, actions), -1.0, 1.0)
    numbers = np.digitize(plain, np.linspace(-1.0, 1.0, bins))
    found: list[int] = (vocabulary - numbers).reshape(-1).tolist()
    return found


class ActionTokens:
    """A codec of gymnasium by token ids. Subclass it, and name the subclass as the codec:

    class Arm(ActionTokens):
        def __init__(self):
            super().__init__(32000, ActionStatistics.read("dataset_statistics.json", "libero_10"))
    """

    def __init__(self, vocabulary: int, statistics: ActionStatistics, bins: int = BINS) -> None:
        """vocabulary: tokens of the model's, without those that only pad its embedding."""
        self._vocabulary, self._statistics, self._bins = vocabulary, statistics, bins

    def describe(self, observation: Any, info: Mapping[str, Any]) -> str:
        """What the policy reads; nothing, where it looks at frames."""
        return ""

    def actions_of_tokens(self, ids: Sequence[int]) -> list[tuple[NDArray[np.float32], int]]:
        """The actions of a turn, each with the number of tokens up to its end."""
        found = actions_of(ids, self._vocabulary, self._statistics, self._bins)
        size = len(self._statistics.low)
        return [(one.astype(np.float32), (n + 1) * size) for n, one in enumerate(found)]
