"""Which rows of a store's objects a ref means, kept small: a span, runs, or packed differences."""

from __future__ import annotations

import base64
import itertools
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

RUNS = 16  # at most so many runs are written as plain numbers; more are packed
MOST = 2**28  # rows of an index that is read from JSON
PACKED = (
    2**24
)  # rows of all indices of a ref that are no spans: 128 MiB of numbers, and 400 to unpack
WIDTHS = (1, 2, 4, 8)  # bytes of a packed difference


class RowIndex:
    """An immutable sequence of row numbers. Spans take no memory; others 8 bytes per row."""

    __slots__ = ("_rows",)
    _rows: range | Indices

    def __init__(self, rows: range | Sequence[int] | Indices) -> None:
        if isinstance(rows, range) and rows.step == 1:
            self._rows = rows
            return
        array = np.array(rows, dtype=np.int64)
        if array.ndim != 1:
            raise ValueError(f"Row numbers form one dimension, not {array.ndim}.")
        if array.size and bool((np.diff(array) == 1).all()):
            self._rows = range(int(array[0]), int(array[-1]) + 1)
            return
        array.setflags(write=False)
        self._rows = array if array.size else range(0)

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowIndex):
            return NotImplemented
        if isinstance(self._rows, range) and isinstance(other._rows, range):
            return self._rows == other._rows
        if isinstance(self._rows, range) or isinstance(other._rows, range):
            return False  # what can be a range is one
        return bool(np.array_equal(self._rows, other._rows))

    def __hash__(self) -> int:
        return hash((len(self), self.array()[:8].tobytes()))

    def __repr__(self) -> str:
        return f"RowIndex({self._rows!r})"

    def array(self) -> Indices:
        if isinstance(self._rows, range):
            return np.arange(self._rows.start, self._rows.stop, dtype=np.int64)
        return self._rows

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the greatest number; of a span without writing it out. Not of no rows."""
        if isinstance(self._rows, range):
            return self._rows.start, self._rows.stop - 1
        return int(self._rows.min()), int(self._rows.max())

    @property
    def total(self) -> int:
        """The sum of the numbers, of a span without writing it out."""
        if isinstance(self._rows, range):
            return (self._rows.start + self._rows.stop - 1) * len(self._rows) // 2
        return int(self._rows.sum())

    def slice(self, start: int, stop: int) -> RowIndex:
        return RowIndex(self._rows[start:stop])

    def take(self, index: Indices) -> RowIndex:
        if isinstance(self._rows, range):
            return RowIndex(index + self._rows.start)
        return RowIndex(self._rows[index])

    def moved(self, by: int) -> RowIndex:
        """Each number greater by so many."""
        if isinstance(self._rows, range):
            return RowIndex(range(self._rows.start + by, self._rows.stop + by))
        return RowIndex(self._rows + by)

    @staticmethod
    def concat(parts: Sequence[RowIndex]) -> RowIndex:
        spans = [part._rows for part in parts if len(part)]
        if not spans:
            return RowIndex(range(0))
        first, last = spans[0], spans[-1]
        if isinstance(first, range) and isinstance(last, range) and _joined(spans):
            return RowIndex(range(first.start, last.stop))
        return RowIndex(np.concatenate([part.array() for part in parts]))

    def to_json(self) -> list[int] | str:
        """Runs as a flat list start, stop, …; many runs as text (zlib of the differences)."""
        if isinstance(self._rows, range):
            return [self._rows.start, self._rows.stop]
        breaks = np.flatnonzero(np.diff(self._rows) != 1) + 1
        if len(breaks) < RUNS:
            starts = np.concatenate([[0], breaks])
            stops = np.concatenate([breaks, [len(self._rows)]]) - 1
            pairs = np.stack([self._rows[starts], self._rows[stops] + 1], axis=1)
            return [int(number) for number in pairs.ravel()]
        steps = np.diff(self._rows, prepend=0)
        zigzag = ((steps << 1) ^ (steps >> 63)).astype(np.uint64)
        width = next(w for w in (1, 2, 4, 8) if int(zigzag.max()) < 1 << 8 * w)
        packed = zlib.compress(zigzag.astype(f"<u{width}").tobytes(), 6)
        return f"{width}:{base64.b85encode(packed).decode()}"

    @staticmethod
    def from_json(value: object, most: int = MOST) -> RowIndex:
        """Raises ValueError or TypeError when `value` was not made by `to_json`.

        most: rows; where `value` says more of them, ValueError before they take any memory.
        """
        if isinstance(value, str):
            return RowIndex(_unpacked(value, most))
        if not isinstance(value, list) or len(value) % 2 or not value:
            raise ValueError(f"row runs are {value!r:.80}")
        runs = [range(start, stop) for start, stop in zip(value[::2], value[1::2], strict=True)]
        if sum(max(0, run.stop - run.start) for run in runs) > most:
            raise ValueError(f"row runs have more than {most} rows")
        if len(runs) == 1:
            return RowIndex(runs[0])
        return RowIndex(np.concatenate([np.arange(run.start, run.stop) for run in runs]))


def _unpacked(value: str, most: int) -> Indices:
    """The numbers that `to_json` packed. ValueError where there are more than `most`."""
    width, _, text = value.partition(":")
    if width not in map(str, WIDTHS):
        raise ValueError(f"packed row numbers have a width of {width:.20} bytes")
    unpacking = zlib.decompressobj()
    try:
        raw = unpacking.decompress(base64.b85decode(text), int(width) * most + 1)
    except zlib.error as error:
        raise ValueError(f"packed row numbers do not unpack: {error}") from error
    if len(raw) > int(width) * most:
        raise ValueError(f"packed row numbers are more than {most}")
    if not unpacking.eof:
        raise ValueError("packed row numbers do not unpack: they are cut short")
    zigzag = np.frombuffer(raw, dtype=f"<u{width}").astype(np.uint64)
    steps = (zigzag >> np.uint64(1)).astype(np.int64) ^ -(zigzag & np.uint64(1)).astype(np.int64)
    return np.cumsum(steps)


def _joined(spans: Sequence[range | Indices]) -> bool:
    """Whether each is a span that begins where the one before it ends."""
    return all(
        isinstance(a, range) and isinstance(b, range) and a.stop == b.start
        for a, b in itertools.pairwise(spans)
    )
