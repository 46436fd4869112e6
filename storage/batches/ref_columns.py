"""The columns of a ref: where each one's rows are, and the arithmetic of picking and joining them.

`storage.batches.refs` offers these as operations on whole batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from storage.batches.columns import Kind, narrowed
from storage.batches.rows import RowIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An object that holds rows."""

    key: str  # relative to the store
    rows: int
    head: int  # bytes of the object's head
    digest: str  # of the head, which vouches for all the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRef:
    """A column: rows picked from the sources' rows, which are counted through in order."""

    kind: Kind
    dtype: str  # safetensors code of the values
    shape: tuple[int, ...]  # of one row (dense), or of one element of a row
    sources: tuple[Source, ...]  # which hold it under its name
    index: (
        RowIndex  # [N] numbers of rows, through all sources; [sum of sizes] where there are sizes
    )
    # [N] of a jagged column whose elements are rows of dense ones: how many each row has. None: its
    # rows are the sources' rows.
    sizes: RowIndex | None = None

    @property
    def apart(self) -> ColumnRef:
        """The dense column of the elements, where the rows are made of those; else itself."""
        if self.sizes is None:
            return self
        return replace(self, kind="dense", sizes=None)

    def picked(self, index: RowIndex) -> ColumnRef:
        """Some of the rows; of one with sizes, by their elements. With all sources."""
        if self.sizes is None:
            return replace(self, index=self.index.take(index.array()))
        sizes, rows = self.sizes.array(), index.array()
        ends = np.cumsum(sizes)
        kept = sizes[rows]
        moved = np.cumsum(kept) - kept
        elements = np.repeat(ends[rows] - kept - moved, kept) + np.arange(kept.sum())
        return replace(self, index=self.index.take(elements), sizes=RowIndex(kept))


def joined_dtype(name: str, parts: Sequence[ColumnRef]) -> str:
    """The number format in which columns of one name are joined; ValueError if they do not agree."""
    first = parts[0]
    if all(
        part.dtype == first.dtype
        and part.kind == first.kind
        and part.shape == first.shape
        and (part.sizes is None) == (first.sizes is None)
        for part in parts
    ):
        return first.dtype
    wide = {part.dtype for part in parts}
    dtypes = [part.dtype if len(wide) == 1 else narrowed(name, part.dtype) for part in parts]
    types = [(part.kind, dtype, part.shape) for part, dtype in zip(parts, dtypes, strict=True)]
    for number, one in enumerate(types):
        if one != types[0]:
            raise ValueError(f"Column {name!r} is {one} in batch {number}, {types[0]} in batch 0.")
    if len({part.sizes is None for part in parts}) > 1:
        raise ValueError(f"Column {name!r} is made of dense rows in some batches, in others not.")
    return dtypes[0]


def prune(sources: tuple[Source, ...], index: RowIndex) -> tuple[RowIndex, list[int]]:
    """Renumber `index` for the sources that it uses; returns it and their positions."""
    if len(sources) <= 1:
        return index, list(range(len(sources)))
    edges = np.concatenate([[0], np.cumsum([source.rows for source in sources])])
    rows = index.array()
    owner = np.searchsorted(edges, rows, side="right") - 1
    used = np.unique(owner)
    if len(used) == len(sources):
        return index, list(range(len(sources)))
    starts = np.zeros(len(sources), np.int64)
    starts[used] = np.concatenate([[0], np.cumsum(np.diff(edges)[used])[:-1]])
    return RowIndex(rows - edges[owner] + starts[owner]), [int(number) for number in used]


def concat(parts: Sequence[ColumnRef]) -> tuple[tuple[Source, ...], RowIndex]:
    """The union of the parts' sources, and one row index over it."""
    union: dict[Source, int] = {}
    total = 0
    pieces = []
    for part in parts:
        starts = np.zeros(max(len(part.sources), 1), np.int64)
        for number, source in enumerate(part.sources):
            if source not in union:
                union[source] = total
                total += source.rows
            starts[number] = union[source]
        if len(part.sources) == 1:  # as a shard's are
            pieces.append(part.index.moved(int(starts[0])))
            continue
        edges = np.concatenate([[0], np.cumsum([s.rows for s in part.sources])]).astype(np.int64)
        rows = part.index.array()
        owner = np.searchsorted(edges, rows, side="right") - 1
        pieces.append(RowIndex(rows - edges[owner] + starts[owner]))
    return tuple(union), RowIndex.concat(pieces)


def shared(columns: dict[str, ColumnRef]) -> dict[str, ColumnRef]:
    """The columns, with equal sources and equal row indices made one object."""
    sources: dict[tuple[Source, ...], tuple[Source, ...]] = {}
    indices: dict[RowIndex, RowIndex] = {}
    views: dict[tuple[int, int], tuple[tuple[Source, ...], RowIndex]] = {}  # by what a column holds
    found = {}
    for name, column in columns.items():
        at = (id(column.sources), id(column.index))
        if at not in views:
            views[at] = (
                sources.setdefault(column.sources, column.sources),
                indices.setdefault(column.index, column.index),
            )
        origin, index = views[at]
        same = origin is column.sources and index is column.index
        found[name] = column if same else replace(column, sources=origin, index=index)
    return found
