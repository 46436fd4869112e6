"""Finding the step that drew a group or a row, in a few reads whatever the number of steps.

Groups are numbered in the order in which they are drawn, and a data cursor only moves on, so both
are found by halving: log2(steps) times a commit.json. A group that a step hands on is followed to
the step whose batch it is part of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from storage.objects.errors import ObjectMissing
from storage.prompts.cursor import Cursor, TasksCursor, current_order, within
from storage.runs.commit_log import Commit, Outline, head, read_commit, read_outline
from storage.runs.run_store import Origin, ancestry
from storage.runs.seen_rows import fresh_rows_of

if TYPE_CHECKING:
    from storage.batches.refs import BatchRef
    from storage.runs.run_store import RunStore

REMOVED = -1  # where a group's number would be, in a step whose batches are gone


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The steps of a run's past that one run committed."""

    run: RunStore
    origin: Origin | None  # of that run
    first: int  # its first step
    last: int  # the last one that is part of the past; first - 1 where there is none

    def __len__(self) -> int:
        return self.last - self.first + 1

    @property
    def takes_over(self) -> bool:
        """Whether its first step is handed the groups that its parent had begun."""
        return self.origin is not None and self.origin.fork and self.origin.cursor


def segments(run: RunStore, version: int | None = None) -> list[Segment]:
    """The past of a version (None: the newest), by the runs that committed it, newest first."""
    past: list[Segment] = []
    last = version
    for current, origin in ancestry(run):
        start = 0 if origin is None else origin.at
        last = (head(current) or start) if last is None else last
        past.append(Segment(run=current, origin=origin, first=start + 1, last=last))
        last = 0 if origin is None else origin.step
    return past


def drew_group(segment: Segment, group: int) -> int | None:
    """The step of a segment that drew a group; None when none did.

    Of commits that do not record their groups the prompts are read; steps whose prompts retention
    removed count as before all others.
    """
    step = _last_where(segment, lambda number: _first_group(segment, number) <= group)
    if step is None:
        return None
    first = _first_group(segment, step)
    count = read_outline(segment.run, step).rows.get("prompts", 0)
    return step if first != REMOVED and group < first + count else None


def _first_group(segment: Segment, step: int) -> int:
    outline = read_outline(segment.run, step)
    if outline.first_group is not None:
        return outline.first_group
    if not outline.rows.get("prompts"):  # it was handed as many as it takes
        return _first_group(segment, step - 1) if step > segment.first else REMOVED
    try:
        prompts = read_commit(segment.run, step).refs["prompts"].rows(0, 1)
        return int(prompts.fetch_numpy(segment.run.store, "group_id")[0][0])
    except ObjectMissing:
        return REMOVED


def _last_where(segment: Segment, holds: Callable[[int], bool]) -> int | None:
    """The last step for which something holds that holds for all before it."""
    low, high = segment.first - 1, segment.last
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low if low >= segment.first else None


def group_size(segment: Segment) -> int | None:
    """Samples of a group in a segment's steps; None where it is not recorded and batches are gone."""
    if not len(segment):
        return None
    outline = read_outline(segment.run, segment.last)
    if outline.group_size is not None:
        return outline.group_size
    samples = read_commit(segment.run, segment.last).refs.get("samples")
    if samples is None or not len(samples):
        return None
    try:
        groups = samples.fetch_numpy(segment.run.store, "group_id")[0]
    except ObjectMissing:
        return None
    return int((groups == groups[0]).sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Fate:
    """What became of a group in the step that settled it."""

    run: RunStore
    commit: Commit
    state: Literal["sampled", "left_out", "removed"]  # removed: its batches, so it is not known


def follow(past: Sequence[Segment], at: int, step: int, group: int) -> Fate:
    """From the step that drew a group, of the segment past[at], to the one that settled it."""
    while True:
        run = past[at].run
        commit = read_commit(run, step)
        if _has(run, commit.refs.get("samples"), group):
            return Fate(run=run, commit=commit, state="sampled")
        if not _has(run, commit.refs.get("carried"), group):
            left_out = _has(run, commit.refs.get("left_out"), group)
            return Fate(run=run, commit=commit, state="left_out" if left_out else "removed")
        if step < past[at].last:
            step += 1
        elif at and past[at - 1].takes_over and len(past[at - 1]):
            at, step = at - 1, past[at - 1].first
        else:  # nobody has gone on with it yet
            return Fate(run=run, commit=commit, state="left_out")


def _has(run: RunStore, ref: BatchRef | None, group: int) -> bool:
    """Whether a batch has a group; not, too, where it was removed."""
    if ref is None or "group_id" not in ref.names:
        return False
    try:
        return bool((ref.fetch_numpy(run.store, "group_id")[0] == group).any())
    except ObjectMissing:
        return False


def drew_row(segment: Segment, row: int) -> Iterator[tuple[int, bool]]:
    """The steps of a segment that drew a row of the data, ascending, each with True.

    By the data cursors: once per epoch. Where these do not tell, in runs of before there were any,
    in a first epoch of unseen rows that are not recorded, and where rows are drawn by difficulty or
    were passed over, every step is named, with False.
    """
    if not len(segment):
        return
    last, task = _cursor(read_outline(segment.run, segment.last)), None
    fresh = fresh_rows_of(segment.run) if last is not None and last.fresh else ()
    if isinstance(last, TasksCursor):
        task, task_rows = next((name, rows) for name, rows in last.ranges.items() if row in rows)
        last, row = last.tasks[task], row - task_rows.start
        fresh = None if fresh is None else within(fresh, task_rows)
    if last is None or fresh is None or _not_by_cursor(segment, last):
        yield from ((step, False) for step in range(segment.first, segment.last + 1))
        return
    begin = _begin(segment, task)
    for epoch in range(begin[0], last.epoch + 1):
        order = current_order(replace(last, epoch=epoch, position=0), fresh)
        (positions,) = np.nonzero(order == row)
        for place in ((epoch, int(at)) for at in positions):
            if begin <= place < (last.epoch, last.position):
                yield _step_at(segment, place, task), True


def _not_by_cursor(segment: Segment, last: Cursor) -> bool:
    passed_over = read_outline(segment.run, segment.last).ledger.quarantined
    return last.order == "difficulty" or passed_over > 0


def _step_at(segment: Segment, place: tuple[int, int], task: str | None) -> int:
    """The step that drew what is at a place of the data, or of a task's: epoch and position."""
    before = _last_where(segment, lambda step: _place(segment, step, task) <= place)
    return segment.first if before is None else before + 1


def _begin(segment: Segment, task: str | None) -> tuple[int, int]:
    """Epoch and position where a segment's first step began to draw."""
    origin = segment.origin
    if origin is None or not origin.cursor:
        return 0, 0
    return _place(replace(segment, run=replace(segment.run, run=origin.run)), origin.step, task)


def _place(segment: Segment, step: int, task: str | None) -> tuple[int, int]:
    cursor = cast("dict[str, Any]", read_outline(segment.run, step).cursor)
    cursor = cursor if task is None else cursor["tasks"][task]
    return int(cursor["epoch"]), int(cursor["position"])


def _cursor(outline: Outline) -> Cursor | None:
    try:
        return Cursor.from_json(outline.cursor)
    except ValueError:
        return None
