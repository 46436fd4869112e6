"""The order in which rows are drawn, and the exact place reached in it.

A cursor is a value: drawing returns a new one, a commit records it, and a resumed run goes on from
it with the very rows that an uninterrupted run would have drawn. Rows themselves are storage/prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np

from configs.data import DataConfig
from storage.objects.documents import JsonValue


class Exhausted(RuntimeError):
    """Every epoch that the settings allow has been drawn to its last row."""


class Countable(Protocol):
    """What an order needs to know of a source: how many rows, and which content."""

    @property
    def digest(self) -> str: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A place in the endless sequence of epochs over one data set."""

    epoch: int  # passes over the data that are finished
    position: int  # rows of the current epoch already drawn, 0 <= position < size
    seed: int  # seed of the order
    order: str  # of each epoch: data.order
    size: int  # rows in an epoch
    digest: str  # content that the order was made for
    fresh: int = 0  # rows of epoch 0, where that is over the unseen rows only; 0: over all

    @classmethod
    def start(cls, config: DataConfig, source: Countable, fresh: int = 0) -> Cursor:
        """The place before the first row. fresh: that many unseen rows come first."""
        return cls(
            epoch=0,
            position=0,
            seed=config.seed,
            order=config.order,
            size=len(source),
            digest=source.digest,
            fresh=fresh,
        )

    @property
    def in_unseen(self) -> bool:
        """Whether it lies in a first epoch of unseen rows only."""
        return bool(self.fresh) and self.epoch == 0

    @property
    def place(self) -> int:
        """Rows that lie before it, of all epochs."""
        first = self.fresh or self.size
        before = 0 if self.epoch == 0 else first + (self.epoch - 1) * self.size
        return before + self.position

    def to_json(self) -> dict[str, JsonValue]:
        """A plain dict, for a commit record."""
        return asdict(self)

    @staticmethod
    def from_json(record: Mapping[str, object]) -> Cursor:
        """The cursor of a commit record; ValueError when a field is missing or of another type."""
        if "tasks" in record:
            return TasksCursor.of_record(record)
        kinds, values = {"order": str, "digest": str}, {}
        if "order" not in record and type(record.get("shuffle")) is bool:  # of an older Refrain
            record = {**record, "order": "shuffled" if record["shuffle"] else "sequential"}
        for one in fields(Cursor):
            missing = one.default if one.name == "fresh" else None
            value, kind = record.get(one.name, missing), kinds.get(one.name, int)
            if type(value) is not kind:
                raise ValueError(
                    f"A data cursor's {one.name} is {value!r}, where {kind.__name__} is expected."
                )
            values[one.name] = value
        return Cursor(**values)  # type: ignore[arg-type]

    @property
    def parts(self) -> Mapping[str, Cursor]:
        """The places that move each by itself: of each task, or this one under no name."""
        return {"": self}

    def remaining(self, epochs: int | None) -> int | None:
        """Rows left to draw when the data may be passed `epochs` times; None without a limit."""
        if epochs is None:
            return None
        of_first = self.fresh - self.size if self.in_unseen else 0
        return max(0, (epochs - self.epoch) * self.size + of_first - self.position)

    def drawn(self, fresh: Sequence[int] = ()) -> np.ndarray:
        """The numbers of all rows that were drawn before it, or were seen before it began."""
        if self.epoch > 0:
            return np.arange(self.size, dtype=np.int64)
        return current_order(self, fresh)[: self.position]


def ranges(sizes: Mapping[str, int]) -> Iterator[tuple[str, range]]:
    """The row numbers of each task, by the tasks' sizes in their order."""
    stops = accumulate(sizes.values())
    for (name, size), stop in zip(sizes.items(), stops, strict=True):
        yield name, range(stop - size, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksCursor(Cursor):
    """A place in several tasks (storage/prompts/tasks.py).

    epoch and position count the rows of all tasks that lie before it.
    """

    tasks: Mapping[str, Cursor] = field(default_factory=dict)  # the place in each, by name
    # Prompts that a task is behind its share, or ahead where below 0; a fraction, such as "-1/3".
    owed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_record(cls, record: Mapping[str, object]) -> TasksCursor:
        """The cursor of a commit record; ValueError when it is none."""
        tasks, owed = record["tasks"], record.get("owed")
        if not isinstance(tasks, dict) or not isinstance(owed, dict) or set(tasks) != set(owed):
            raise ValueError(
                f"A data cursor's tasks are {tasks!r}, and what is owed them {owed!r}."
            )
        whole = Cursor.from_json({k: v for k, v in record.items() if k not in ("tasks", "owed")})
        return cls(
            **{one.name: getattr(whole, one.name) for one in fields(Cursor)},
            tasks={name: Cursor.from_json(tasks[name]) for name in sorted(tasks)},
            owed={name: str(Fraction(str(owed[name]))) for name in sorted(owed)},
        )

    def to_json(self) -> dict[str, JsonValue]:
        """A plain dict, for a commit record."""
        whole = {one.name: getattr(self, one.name) for one in fields(Cursor)}
        places = {name: dict(one.to_json()) for name, one in self.tasks.items()}
        return {**whole, "tasks": places, "owed": dict(self.owed)}

    @property
    def ranges(self) -> dict[str, range]:
        """The row numbers of each task."""
        return dict(ranges({name: one.size for name, one in self.tasks.items()}))

    @property
    def parts(self) -> Mapping[str, Cursor]:
        """The places in the tasks, by name."""
        return self.tasks

    @property
    def in_unseen(self) -> bool:
        """Whether some task is in a first epoch of unseen rows only."""
        return any(one.in_unseen for one in self.tasks.values())

    @property
    def place(self) -> int:
        """Rows that lie before it, of all tasks and epochs."""
        return sum(one.place for one in self.tasks.values())

    def remaining(self, epochs: int | None) -> int | None:
        """No task ends before another: data.epochs is refused."""
        return None

    def drawn(self, fresh: Sequence[int] = ()) -> np.ndarray:
        """The numbers of all rows that were drawn before it, or were seen before it began."""
        found = [
            own.start + self.tasks[name].drawn(within(fresh, own))
            for name, own in self.ranges.items()
        ]
        return np.concatenate(found)

    def moved(self, tasks: Mapping[str, Cursor], owed: Mapping[str, str]) -> TasksCursor:
        """With other places in its tasks."""
        place = sum(one.place for one in tasks.values())
        epoch, position = divmod(place, self.size)
        return replace(self, epoch=epoch, position=position, tasks=dict(tasks), owed=dict(owed))


def within(rows: Sequence[int], own: range) -> list[int]:
    """Those of some row numbers that are a task's, as numbers within the task."""
    return [row - own.start for row in rows if row in own]


@lru_cache(maxsize=8)
def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    """The shuffled row numbers of one epoch, int64 [size], read-only.

    Rows are sorted by 64 random bits each. NumPy promises the raw stream of a bit generator for
    good, but not that of Generator.permutation, and a resumed run may meet another NumPy.
    """
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(size)
    order = np.argsort(bits, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def current_order(
    cursor: Cursor, fresh: Sequence[int] = (), ranks: np.ndarray | None = None
) -> np.ndarray:
    """The row numbers of the cursor's epoch in the order in which they are drawn.

    `fresh`: the unseen rows, which make up epoch 0 of a cursor that has some. `ranks`: of all rows
    [size], in whose order they come where that is by difficulty; None: nothing was measured yet.
    """
    first = cursor.in_unseen
    size = cursor.fresh if first else cursor.size
    if first and len(fresh) != size:
        raise ValueError(f"The cursor's first epoch has {size} unseen rows, not {len(fresh)}.")
    rows = np.asarray(fresh, np.int64) if first else np.arange(size, dtype=np.int64)
    if cursor.order == "sequential":
        return rows
    rows = rows[epoch_order(size, cursor.seed, cursor.epoch)]
    if cursor.order == "shuffled" or ranks is None:
        return rows
    return rows[np.argsort(ranks[rows], kind="stable")]


class NothingToDraw(RuntimeError):
    """Every row of the data is in quarantine."""


class Ranks(Protocol):
    """What rows are ordered by, where that is by difficulty."""

    def __call__(self, epoch: int, task: str = "") -> np.ndarray | None:
        """Of all rows of the data, for an epoch over a task's, or over all; None: not measured."""


def unranked(epoch: int, task: str = "") -> np.ndarray | None:
    """The ranks of an epoch's rows where nothing is measured."""
    return None


def check_same_data(source: Countable, cursor: Cursor) -> None:
    """ValueError, in one sentence, when the source is not the one that the cursor was made for."""
    if len(source) != cursor.size or source.digest != cursor.digest:
        raise ValueError(
            f"The data has changed since this order began: {cursor.size} rows with digest "
            f"{cursor.digest} then, {len(source)} rows with digest {source.digest} now. "
            "Restore the data, or start a new run."
        )


def draw(
    source: Countable,
    cursor: Cursor,
    n: int,
    epochs: int | None = None,
    fresh: Sequence[int] = (),
    kept_out: np.ndarray | None = None,
    ranks: Callable[[int], np.ndarray | None] = unranked,
) -> tuple[list[int], Cursor]:
    """The next `n` row numbers and the cursor after them.

    `fresh`: see `current_order`. `kept_out`: bool [size], rows that are passed over. `ranks`: those
    of an epoch. Every other row comes once per epoch; a draw may cross from one epoch into the next.
    With `epochs` set, the last draw is short when fewer than `n` rows are left, and the one after it
    raises Exhausted. ValueError when the source is not the one that the cursor was made for,
    NothingToDraw where all rows are kept out.
    """
    check_same_data(source, cursor)
    if cursor.remaining(epochs) == 0:
        raise Exhausted(f"All {epochs} epochs of {cursor.size} rows have been drawn.")
    if kept_out is not None and kept_out.all():
        raise NothingToDraw(
            f"All {cursor.size} rows of the data are in quarantine. Let rows in again by "
            "refrain quarantine RUN --readmit all, or set data.quarantine to wider bounds or to "
            "null, and resume the run."
        )
    taken: list[int] = []
    while len(taken) < n and cursor.remaining(epochs) != 0:
        order = current_order(cursor, fresh, ranks(cursor.epoch))
        rest = order[cursor.position :]
        (there,) = np.nonzero(np.ones(len(rest), bool) if kept_out is None else ~kept_out[rest])
        chosen = there[: n - len(taken)]
        taken.extend(rest[chosen].tolist())
        stop = cursor.position + int(chosen[-1]) + 1 if len(taken) == n else len(order)
        if stop == len(order):
            cursor = replace(cursor, epoch=cursor.epoch + 1, position=0)
        else:
            cursor = replace(cursor, position=stop)
    return taken, cursor
