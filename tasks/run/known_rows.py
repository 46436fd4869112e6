"""What the draw of a step goes by besides its cursor: nothing, unless a feature of the run knows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.prompts.cursor import Cursor, Ranks, unranked
from storage.runs.commit_log import Commit


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownRows:
    """What a draw goes by besides its cursor."""

    kept_out: NDArray[np.bool_] | None = None  # [rows of the data] in quarantine; None: no row
    ranks: Ranks = unranked  # by which rows are ordered, for an epoch of all, or of a task's
    readmissions: int = 0  # requests to readmit rows that it takes account of


class RowTracker:
    """Knows nothing of the rows of a run's data; a feature has one that follows the steps."""

    def for_draw(self, step: int) -> KnownRows:
        """What the draw of a step goes by."""
        return KnownRows()

    def has_drawn(self, step: int, cursor: Cursor) -> None:
        """A step has drawn up to a place."""

    def committed(self, commit: Commit) -> None:
        """A step is committed."""
