"""What a run knows of the rows of its data, step by step, and what each draw goes by.

The draw of step k goes by the rows as they stood after step k - 1 - max_staleness: steps that are
still under way may end sooner or later, and have no part in it. So a resumed run draws what it would
have drawn. Commits name the tables that later draws need.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from storage.batches.refs import BatchRef
from storage.prompts.cursor import Cursor, unranked
from storage.rows import readmissions
from storage.rows.row_history import RowHistory
from storage.runs.commit_log import Commit, read_outline
from tasks.run.clock import KnownRows, RowTracker
from tasks.run.facts import OpenedRun, Position

HISTORY = "row_history"  # refs of a commit: after its step; with -1, -2, … after those before it
# By which the epoch is ordered in which the next step draws; of a task, with - and its name.
DIFFICULTY = "difficulty"


def begun(cursor: Cursor) -> dict[str, int]:
    """The last epoch of which rows were drawn before a place, and whose order is thus decided.

    Of each task by its name, or of all rows under none.
    """
    places = cursor.parts.items()
    return {name: one.epoch if one.position else one.epoch - 1 for name, one in places}


def order_name(task: str) -> str:
    """The name in a commit's refs of what a task's epoch is ordered by."""
    return f"{DIFFICULTY}-{task}" if task else DIFFICULTY


class RowHistories(RowTracker):
    """The tables of the steps from which draws that are still to come go on."""

    def __init__(self, opened: OpenedRun, position: Position) -> None:
        self._config, self._files = opened.config, opened.files
        self._size, self._start = position.cursor.size, opened.start
        self._after: dict[int, BatchRef] = {}  # step -> the rows after it
        # Step -> by which the epoch begun is ordered, of each task.
        self._ordered_by: dict[int, dict[str, BatchRef]] = {}
        self._seen: dict[int, int] = {self._start: 0}  # step -> requests that its draw knew of
        # Step -> the epoch that was begun before it, of each task.
        self._epochs = {position.head + 1: begun(position.cursor)}
        last, origin = position.last, opened.origin
        same_data = origin is None or origin.cursor or position.head > opened.start
        if last is None or not same_data:
            return
        self._take(position.head, last)
        for step in range(max(self._start + 1, position.head - self._lag), position.head + 1):
            self._seen[step] = read_outline(self._files, step).readmissions

    @property
    def _lag(self) -> int:
        """Steps that may be under way when one draws, besides itself."""
        return self._config.max_staleness

    def before(self, step: int) -> BatchRef | None:
        """The rows after the step before; None: none was drawn yet."""
        return self._after.get(step - 1)

    def for_draw(self, step: int) -> KnownRows:
        """What the draw of a step goes by."""
        data = self._config.data
        ordered_by = self._ordered_by.get(step, {})

        def ranks(epoch: int, task: str = "") -> NDArray[np.float64] | None:
            begins = epoch != self._epochs[step][task]
            ref = self._known(step) if begins else ordered_by.get(task)
            return None if ref is None else self._read(ref).ranks(self._size)

        ranked = ranks if data.order == "difficulty" else unranked
        if data.quarantine is None:
            return KnownRows(ranks=ranked)
        asked = readmissions.asked(self._files)
        again = readmissions.between(self._files, self._seen[self._point(step)], asked)
        known = self._known(step)
        kept_out = None if known is None else self._read(known).kept_out(self._size, again)
        return KnownRows(kept_out=kept_out, ranks=ranked, readmissions=asked)

    def has_drawn(self, step: int, cursor: Cursor) -> None:
        """A step has drawn up to a place: in the epoch under way there, if one is, it drew too."""
        known, before, epochs = self._known(step), self._ordered_by.get(step, {}), begun(cursor)
        found = {
            name: before.get(name) if epochs[name] == self._epochs[step][name] else known
            for name, place in cursor.parts.items()
            if place.position
        }
        self._ordered_by[step + 1] = {name: ref for name, ref in found.items() if ref is not None}
        self._epochs[step + 1] = epochs

    def named(self, step: int, after: BatchRef) -> dict[str, BatchRef]:
        """The refs that the commit of a step names, after which the rows are `after`."""
        found = {HISTORY: after}
        for back in range(1, self._lag + 1):
            if (ref := self._after.get(step - back)) is not None:
                found[f"{HISTORY}-{back}"] = ref
        ordered_by = self._ordered_by.get(step + 1, {})
        return found | {order_name(name): ref for name, ref in ordered_by.items()}

    def readmitted(self, step: int, seen: int) -> set[int] | None:
        """Rows that a step lets in again, whose draw knew of so many requests; None: all."""
        return readmissions.between(self._files, self._seen.get(step - 1, 0), seen)

    def committed(self, commit: Commit) -> None:
        """A step is committed."""
        self._take(commit.step, commit)
        self._seen[commit.step] = commit.readmissions
        oldest = commit.step - self._lag
        for known in (self._after, self._seen):
            for step in [step for step in known if step < oldest]:
                del known[step]
        self._ordered_by.pop(commit.step, None)
        self._epochs.pop(commit.step, None)

    def _take(self, step: int, commit: Commit) -> None:
        for back in range(self._lag + 1):
            ref = commit.refs.get(HISTORY if back == 0 else f"{HISTORY}-{back}")
            if ref is not None and step - back >= self._start:
                self._after[step - back] = ref
        epochs = begun(Cursor.from_json(commit.cursor))
        refs = {name: commit.refs.get(order_name(name)) for name in epochs}
        self._ordered_by[step + 1] = {name: ref for name, ref in refs.items() if ref is not None}
        self._epochs[step + 1] = epochs

    def _point(self, step: int) -> int:
        """The step after which the rows are those that a step's draw goes by."""
        return max(self._start, step - 1 - self._lag)

    def _known(self, step: int) -> BatchRef | None:
        return self._after.get(self._point(step))

    def _read(self, ref: BatchRef) -> RowHistory:
        return RowHistory.read(self._files.store, ref)
