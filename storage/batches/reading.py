"""Reading the rows and columns that a ref names: exact byte ranges, in parallel, each checked.

The heads of the sources come first (one small range each, kept by the process), then the values of
all columns in one request. Without torch; `storage.batches.tensors` turns the result into tensors.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from storage.batches.columns import Kind, narrowed
from storage.batches.format import DTYPES, Bytes, Offsets, StoredColumn, parse, row_checksums
from storage.objects.documents import digest
from storage.objects.errors import ObjectDamaged

if TYPE_CHECKING:
    from storage.batches.ref_columns import ColumnRef, Source
    from storage.batches.rows import RowIndex
    from storage.objects.store import Store

Pick = Callable[["RowIndex"], "RowIndex"]
HEADS = 256  # heads that a process keeps, by digest; about 10 KB each for 64 rows of 12 columns

_heads: OrderedDict[str, dict[str, StoredColumn]] = OrderedDict()
_lock = threading.Lock()
_prefetchers = ThreadPoolExecutor(2, thread_name_prefix="prefetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadColumn:
    """A column in memory. `values` may map a file: writing to it changes this process only."""

    kind: Kind
    dtype: str
    shape: tuple[int, ...]  # of one row (dense), or of one element of a row
    values: Bytes
    offsets: Offsets | None  # [N + 1], in elements; None for dense

    def numpy(self) -> tuple[NDArray[np.generic], Offsets | None]:
        array: NDArray[np.generic] = self.values.view(DTYPES[self.dtype][1])
        if self.dtype == "BOOL":
            array = array.view(np.bool_)
        if self.dtype == "BF16":  # the upper half of a float32
            array = (array.astype(np.uint32) << 16).view(np.float32)
        return array.reshape(self._first(), *self.shape), self.offsets

    def _first(self) -> int:
        if self.offsets is not None:
            return int(self.offsets[-1])
        size = DTYPES[self.dtype][0] * int(np.prod(self.shape, dtype=np.int64))
        return self.values.nbytes // size if size else 0

    def rows(self) -> list[object]:
        """A Python value per row: text, parsed JSON, or an array."""
        array, offsets = self.numpy()
        if offsets is None:
            return list(array)
        edges = offsets.tolist()
        spans = list(pairwise(edges))
        if self.kind == "jagged":
            return [array[a:b] for a, b in spans]
        raw = self.values.tobytes()
        try:
            texts = [raw[a:b].decode() for a, b in spans]
            return list(texts) if self.kind == "str" else [json.loads(text) for text in texts]
        except (ValueError, RecursionError) as error:
            raise ObjectDamaged(
                f"A row of a {self.kind} column is damaged: {str(error).splitlines()[0]}."
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The rows of one column that lie in one source."""

    source: Source
    name: str  # of the column
    stored: StoredColumn
    rows: NDArray[np.int64]  # ascending, without repeats
    ranges: list[tuple[int, int]]  # of bytes: one for each run of neighbouring rows

    @property
    def whole(self) -> bool:
        return len(self.rows) == self.source.rows

    @property
    def label(self) -> str:
        return f"column {self.name!r} of object {self.source.key}"


def columns_of(key: str, head: memoryview, rows: int | None = None) -> dict[str, StoredColumn]:
    """The columns of the object `key`, of its head. ObjectDamaged where it is none (`parse`)."""
    try:
        return parse(head, rows)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ObjectDamaged(f"Object {key} is no batch object: {error}.") from error


def heads(
    store: Store, sources: set[Source], anew: bool = False
) -> dict[str, dict[str, StoredColumn]]:
    """The columns of each source, by the digest of its head, read where they are not known.

    anew: read them all, to see whether they are still what was written.
    """
    found = {}
    with _lock:
        for source in sources:
            if source.digest in _heads and not anew:
                _heads.move_to_end(source.digest)
                found[source.digest] = _heads[source.digest]
    missing = [source for source in sources if source.digest not in found]
    data = store.read_ranges([(source.key, 0, source.head) for source in missing])
    for source, head in zip(missing, data, strict=True):
        if head.nbytes < source.head:
            raise ObjectDamaged(
                f"Object {source.key} is damaged: it ends after {head.nbytes} bytes, "
                f"before the end of its head of {source.head} bytes."
            )
        if digest(head) != source.digest:
            raise ObjectDamaged(
                f"Object {source.key} is damaged: its head has digest {digest(head)}, "
                f"the reference says {source.digest}."
            )
        found[source.digest] = columns_of(source.key, head, source.rows)
    with _lock:
        for source in missing:
            _heads[source.digest] = found[source.digest]
        while len(_heads) > HEADS:
            _heads.popitem(last=False)
    return found


def lengths(store: Store, name: str, column: ColumnRef) -> NDArray[np.int64]:
    """[N]: the elements of each row of a jagged, str or json column."""
    if column.kind == "dense":
        raise ValueError(f"Column {name!r} is dense: its rows have no lengths.")
    if column.sizes is not None:
        return column.sizes.array()
    known = heads(store, set(column.sources))
    held = []
    for source in column.sources:
        offsets = _stored(known, source, name, column).offsets
        held.append(np.diff(offsets) if offsets is not None else np.zeros(0, np.int64))
    every = np.concatenate([np.zeros(0, np.int64), *held])
    return every[column.index.array()]


def _stored(
    known: dict[str, dict[str, StoredColumn]], source: Source, name: str, column: ColumnRef
) -> StoredColumn:
    stored = known[source.digest].get(name)
    wanted = (column.kind, column.dtype, column.shape)
    readable = stored is not None and (
        (stored.kind, stored.shape) == (column.kind, column.shape)
        and column.dtype in (stored.dtype, narrowed(name, stored.dtype))
    )
    if stored is None or not readable:
        raise ObjectDamaged(f"Object {source.key} holds no column {name!r} of type {wanted}.")
    return stored


def read_columns(store: Store, columns: Mapping[str, ColumnRef]) -> dict[str, ReadColumn]:
    """Read and check the columns. Raises ObjectMissing, ObjectDamaged."""
    plans = _plan(store, columns)
    wanted = [
        (part.source.key, start, stop)
        for parts, _ in plans.values()
        for part in parts
        for start, stop in part.ranges
    ]
    data = iter(store.read_ranges(wanted))
    result = {}
    for name, (parts, order) in plans.items():
        read = [[next(data) for _ in part.ranges] for part in parts]
        values = [_checked(part, pieces) for part, pieces in zip(parts, read, strict=True)]
        # What is cached must not be handed out for writing; joined pieces are nobody else's.
        cached = store.backend.remote and [len(pieces) for pieces in read] == [1]
        column = columns[name]
        result[name] = _assemble(column.apart, parts, values, order, cached)
        if column.sizes is not None:
            edges = np.concatenate([np.zeros(1, np.int64), column.sizes.array()]).cumsum()
            result[name] = replace(result[name], kind=column.kind, offsets=edges)
    return result


def prefetch(store: Store, columns: Mapping[str, ColumnRef]) -> Future[None]:
    def read() -> None:
        plans = _plan(store, columns)
        parts = [part for found, _ in plans.values() for part in found]
        ranges = [(p.source.key, start, stop) for p in parts for start, stop in p.ranges]
        for view in store.read_ranges(ranges):
            view[::4096].tobytes()  # touch each page of a mapped file

    return _prefetchers.submit(read)


def _plan(
    store: Store, columns: Mapping[str, ColumnRef]
) -> dict[str, tuple[list[_Part], NDArray[np.int64] | None]]:
    """For each column its parts in order, and the order of rows if it is not ascending."""
    columns = {name: column.apart for name, column in columns.items()}
    known = heads(store, {source for column in columns.values() for source in column.sources})
    spread: dict[tuple[int, int], _Spread] = {}
    plans = {}
    for name, column in columns.items():
        view = (id(column.sources), id(column.index))
        if view not in spread:
            spread[view] = _spread(column)
        parts = []
        for number, rows in spread[view].rows:
            source = column.sources[number]
            stored = _stored(known, source, name, column)
            ranges = _byte_ranges(stored.byte_offsets(), rows)
            parts.append(_Part(source=source, name=name, stored=stored, rows=rows, ranges=ranges))
        plans[name] = (parts, spread[view].order)
    return plans


@dataclass(frozen=True, slots=True)
class _Spread:
    """A row index taken apart: rows by source, ascending, and how to put them in order."""

    rows: list[tuple[int, NDArray[np.int64]]]  # (number of the source, its rows)
    order: NDArray[np.int64] | None  # [N] into the ascending rows; None when they are the order


def _spread(column: ColumnRef) -> _Spread:
    rows = column.index.array()
    order = None
    if len(rows) > 1 and not bool((np.diff(rows) > 0).all()):
        rows, order = np.unique(rows, return_inverse=True)
    edges = np.cumsum([source.rows for source in column.sources])
    cuts = np.concatenate([[0], np.searchsorted(rows, edges)])
    starts = np.concatenate([[0], edges])
    return _Spread(
        [
            (number, rows[cuts[number] : cuts[number + 1]] - starts[number])
            for number in range(len(column.sources))
            if cuts[number + 1] > cuts[number]
        ],
        order,
    )


def _byte_ranges(edges: Offsets, rows: NDArray[np.int64]) -> list[tuple[int, int]]:
    """One range for each run of neighbouring rows."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    firsts = rows[np.concatenate([[0], breaks])]
    lasts = rows[np.concatenate([breaks, [len(rows)]]) - 1]
    return list(zip(edges[firsts].tolist(), edges[lasts + 1].tolist(), strict=True))


def _checked(part: _Part, pieces: list[memoryview]) -> Bytes:
    """What was read, joined; compared with the column's digest, or by row with its checksums."""
    for (start, stop), piece in zip(part.ranges, pieces, strict=True):
        if piece.nbytes < stop - start:
            edges = part.stored.byte_offsets()
            row = int(np.searchsorted(edges[1:], start + piece.nbytes, side="right"))
            raise ObjectDamaged(
                f"Object {part.source.key} is damaged: it ends at byte {start + piece.nbytes}, "
                f"within row {row} of column {part.name!r}."
            )
    if part.whole and digest(pieces[0]) == part.stored.digest:
        return np.frombuffer(pieces[0], np.uint8)
    arrays = [np.frombuffer(piece, np.uint8) for piece in pieces]
    values = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    edges = part.stored.byte_offsets()
    lengths = edges[part.rows + 1] - edges[part.rows]
    at = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
    sums = row_checksums(values, at, part.stored.kind)
    wrong = np.flatnonzero(sums != part.stored.sums[part.rows])
    if len(wrong):
        row = part.rows[wrong[0]]
        raise ObjectDamaged(f"Row {row} of {part.label} is damaged: its checksum does not match.")
    if part.whole:
        raise ObjectDamaged(f"The {part.label} is damaged: its digest does not match.")
    return values


def _assemble(
    column: ColumnRef,
    parts: list[_Part],
    read: list[Bytes],
    order: NDArray[np.int64] | None,
    copy: bool,
) -> ReadColumn:
    """Join what was read, and put the rows in the ref's order."""
    views = [
        _as(values, part.stored.dtype, column.dtype)
        for part, values in zip(parts, read, strict=True)
    ]
    if len(views) == 1:
        values = views[0].copy() if copy else views[0]
    else:
        values = np.concatenate([np.zeros(0, np.uint8), *views])
    offsets = None
    if column.kind != "dense":
        sizes = [
            np.diff(part.stored.offsets)[part.rows]
            for part in parts
            if part.stored.offsets is not None
        ]
        offsets = np.concatenate([np.zeros(1, np.int64), *sizes]).cumsum()
    if order is not None:
        values, offsets = _reorder(column, values, offsets, order)
    return ReadColumn(
        kind=column.kind, dtype=column.dtype, shape=column.shape, values=values, offsets=offsets
    )


def _as(values: Bytes, stored: str, wanted: str) -> Bytes:
    """Bytes of numbers in the format `stored`, in the narrower one that the ref names."""
    if stored == wanted:
        return values
    return values.view(DTYPES[stored][1]).astype(DTYPES[wanted][1]).view(np.uint8)


def _reorder(
    column: ColumnRef, values: Bytes, offsets: Offsets | None, order: NDArray[np.int64]
) -> tuple[Bytes, Offsets | None]:
    size = DTYPES[column.dtype][0] * int(np.prod(column.shape, dtype=np.int64))
    elements = values.reshape(-1, size) if size else values.reshape(0, 1)
    if offsets is None:
        return (elements[order].ravel() if size else values), None
    sizes = np.diff(offsets)[order]
    moved = np.concatenate([np.zeros(1, np.int64), sizes]).cumsum()
    # Element j of output row i is element j of input row order[i].
    index = np.arange(moved[-1]) + np.repeat(offsets[:-1][order] - moved[:-1], sizes)
    return (elements[index].ravel() if size else values), moved
