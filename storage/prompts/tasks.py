"""Several tasks as one source, and the place that a run has reached in each of them.

The rows of the tasks stand one task after the other, by name, so a row has one number in the run
whatever its task. Each task has an order, epochs and a cursor of its own. How many prompts of a step
are whose follows from the weights (`shared_out`), and is part of the place that commits record.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from fractions import Fraction

import numpy as np
import xxhash

from configs.data import DataConfig
from storage.objects.documents import Row
from storage.prompts.cursor import (
    Cursor,
    NothingToDraw,
    Ranks,
    TasksCursor,
    check_same_data,
    ranges,
    unranked,
    within,
)
from storage.prompts.cursor import draw as draw_rows
from storage.prompts.source import TASK, PromptSource


class TaskRows(PromptSource):
    """The rows of several tasks, each with its task's name in the column `task`."""

    def __init__(self, parts: Mapping[str, PromptSource]) -> None:
        self.parts = {name: parts[name] for name in sorted(parts)}
        self.name = ", ".join(f"{name}: {part.name}" for name, part in self.parts.items())
        columns = (column for part in self.parts.values() for column in part.columns)
        self.columns = tuple(dict.fromkeys([*columns, TASK]))
        digests = json.dumps([[name, part.digest] for name, part in self.parts.items()]).encode()
        self.digest = f"tasks-sha256:{hashlib.sha256(digests).hexdigest()}"
        self.ranges = dict(ranges({name: len(part) for name, part in self.parts.items()}))

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    def task_of(self, row: int) -> str:
        """The task of the row with this number."""
        return next(name for name, rows in self.ranges.items() if row in rows)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        self._in_range(indices)
        found: dict[int, Row] = {}
        for name, own in self.ranges.items():
            places = [place for place, index in enumerate(indices) if index in own]
            read = self.parts[name].rows([indices[place] - own.start for place in places])
            found |= {place: {**row, TASK: name} for place, row in zip(places, read, strict=True)}
        return [found[place] for place in range(len(indices))]

    def check_columns(self, needed: Iterable[str]) -> None:
        filled = [column for column in needed if column != TASK]
        for part in self.parts.values():
            part.check_columns(filled)

    def has_column(self, name: str) -> bool:
        return name == TASK or any(part.has_column(name) for part in self.parts.values())

    def _row_digests(self, rows: range) -> np.ndarray:
        """Equal rows of two tasks are told apart: each task's draws count for itself."""
        found = [np.empty(0, np.uint64)]
        for name, own in self.ranges.items():
            start, stop = max(rows.start, own.start), min(rows.stop, own.stop)
            if start < stop:
                there = range(start - own.start, stop - own.start)
                salt = np.uint64(xxhash.xxh3_64_intdigest(name.encode()))
                found.append(self.parts[name].row_digests(there) ^ salt)
        return np.concatenate(found)


def begin(config: DataConfig, source: TaskRows, fresh: Sequence[int]) -> TasksCursor:
    """The place before the first row. fresh: numbers of unseen rows, which come first."""
    places = {
        name: Cursor.start(config, part, len(within(fresh, source.ranges[name])))
        for name, part in source.parts.items()
    }
    whole = Cursor.start(config, source, len(fresh))
    return TasksCursor(
        **{one.name: getattr(whole, one.name) for one in fields(Cursor)},
        tasks=places,
        owed=dict.fromkeys(places, "0"),
    )


def shared_out(
    cursor: TasksCursor, count: int, weights: Mapping[str, Fraction]
) -> tuple[dict[str, int], TasksCursor]:
    """How many of `count` prompts are of which task, and the cursor that knows of it.

    Each task is owed its share of the count, and what it is behind from before. It gets the whole
    prompts of that; those left over go to the largest remainders, of equal ones to the first by name.
    So over n prompts a task of a fixed share s has n s, give or take less than two. With weights
    1 and 2 and 4 prompts a step: {a: 1, b: 3}, {a: 2, b: 2}, {a: 1, b: 3}, ….
    """
    total = sum((weights[name] for name in cursor.tasks), Fraction(0))
    assert total > 0, "a rule asks for a weight above 0"
    owed = {
        name: Fraction(cursor.owed[name]) + count * weights[name] / total for name in cursor.tasks
    }
    # A task without weight gets nothing, whatever it is behind.
    shares = {name: owed[name] if weights[name] else Fraction(0) for name in owed}
    counts = {name: max(0, share.numerator // share.denominator) for name, share in shares.items()}
    open_to = [name for name in counts if weights[name]]
    while sum(counts.values()) < count:
        most = max(open_to, key=lambda name: shares[name] - counts[name])
        counts[most] += 1
    while sum(counts.values()) > count:
        least = min((n for n in open_to if counts[n]), key=lambda name: shares[name] - counts[name])
        counts[least] -= 1
    left = {name: str(owed[name] - counts[name]) for name in owed}
    return counts, cursor.moved(cursor.tasks, left)


def in_turns(counts: Mapping[str, int]) -> list[str]:
    """The tasks of some prompts, spread evenly: {a: 1, b: 3} is b, a, b, b.

    The k-th of n prompts of a task stands at (k - 1/2) / n of the way; of equal ones the first by
    name is before.
    """
    places = [
        (Fraction(2 * number + 1, 2 * count), name)
        for name, count in counts.items()
        for number in range(count)
    ]
    return [name for _, name in sorted(places)]


def draw_tasks(
    source: TaskRows,
    cursor: TasksCursor,
    counts: Mapping[str, int],
    fresh: Sequence[int] = (),
    kept_out: np.ndarray | None = None,
    ranks: Ranks = unranked,
) -> tuple[list[int], TasksCursor]:
    """So many rows of each task, in turns (`in_turns`), and the cursor after them.

    fresh, kept_out, ranks: as `cursor.draw` takes them, of all tasks' rows. ValueError when the
    source is not the one that the cursor was made for, NothingToDraw where all rows of a task of
    which some are asked are kept out.
    """
    check_same_data(source, cursor)
    places, found = dict(cursor.tasks), {}
    for name, own in cursor.ranges.items():
        if not counts.get(name):
            continue
        out = None if kept_out is None else kept_out[own.start : own.stop]
        if out is not None and out.all():
            raise NothingToDraw(
                f"All {len(own)} rows of the task {name} are in quarantine. Let rows in again by "
                "refrain quarantine RUN --readmit all, or set data.quarantine to wider bounds or to "
                "null, and resume the run."
            )

        def of_own(epoch: int, name: str = name, own: range = own) -> np.ndarray | None:
            found = ranks(epoch, name)
            return None if found is None else found[own.start : own.stop]

        rows, places[name] = draw_rows(
            source.parts[name], places[name], counts[name], None, within(fresh, own), out, of_own
        )
        found[name] = [own.start + row for row in rows]
    taken = {name: iter(rows) for name, rows in found.items()}
    order = in_turns({name: len(rows) for name, rows in found.items()})
    return [next(taken[name]) for name in order], cursor.moved(places, cursor.owed)
