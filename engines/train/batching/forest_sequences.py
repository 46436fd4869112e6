"""Rows that are forests of requests, as the sequences that they are packed by: one for each path.

What paths share is found by their tokens, as of rows with tree training (packed_batch.py), and
computed once. What comes out of a forward pass is one number for each response token again, in the
order of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engines.models.routed_experts import RoutedExperts
from storage.batches.forest import Forest

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """The paths of some rows, each of two tokens or more: of one token nothing is predicted.

    Example: the row of Forest's example, with the tokens 5 6 | 7 8 9 | 4 | 3 2
        Sequences(
            tokens=[[5, 6, 7, 8, 9], [5, 6, 7, 8, 4], [3, 2]],
            paths=[[[0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [6, 7]]],
            forests=[...],
        )
    """

    tokens: list[Ints]  # of each path, row after row
    paths: list[list[Ints]]  # of each row: numbers of the tokens of each of its paths
    forests: Sequence[Forest]

    @classmethod
    def of(
        cls, prompts: Sequence[Ints], responses: Sequence[Ints], forests: Sequence[Forest]
    ) -> Sequences:
        """Those of rows with prompts [P_i] and responses [R_i]."""
        paths = [[path for path in forest.paths() if len(path) > 1] for forest in forests]
        laid = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
        tokens = [row[path] for row, own in zip(laid, paths, strict=True) for path in own]
        return cls(tokens=tokens, paths=paths, forests=forests)

    def predictors(self, members: Sequence[Ints]) -> list[Ints]:
        """Of each row [R_i]: where the token is computed that each response token goes on after.

        0, of which nothing is trained, where it begins a conversation of its own. Where two paths
        compute it apart (LongRoPE: positions of long sequences differ) the first one counts.

        members: of each path, where its tokens but for the last are computed.
        """
        found, each = [], iter(members)
        for forest, paths in zip(self.forests, self.paths, strict=True):
            before = np.zeros(forest.tokens, np.int64)
            for path, member in reversed(list(zip(paths, each, strict=False))):
                before[path[1:]] = member
            found.append(before[forest.prompt :])
        return found

    def experts(self, rows: Sequence[RoutedExperts]) -> list[RoutedExperts]:
        """Of each path [tokens - 1, L, k], from each row's: those of the token before each other."""
        return [
            own[path[1:] - 1] for own, paths in zip(rows, self.paths, strict=True) for path in paths
        ]
