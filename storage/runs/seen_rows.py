"""Which rows a run and the runs before it have drawn, told by their content.

Two objects of a run, little-endian uint64: rows.u64, the digest of each row of its data in their
order, and seen.u64, the digests of the rows that earlier runs had drawn. With a commit's cursor they
say which rows had been seen at any step, also after the data set has grown or was sorted anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from storage.objects.errors import ObjectDamaged, ObjectMissing
from storage.prompts.cursor import Cursor
from storage.runs.run_store import RunStore, ancestry

ROWS = "rows.u64"
SEEN = "seen.u64"


class RowSource(Protocol):
    """What is needed of a source."""

    @property
    def digest(self) -> str: ...

    def __len__(self) -> int: ...

    def row_digests(self, rows: range | None = None) -> np.ndarray: ...

    def as_recorded(self, digest: str) -> RowSource: ...


def write_rows(run: RunStore, digests: np.ndarray) -> None:
    """Keep the digests of the run's data, uint64 [rows], for runs that go on from this one."""
    run.store.write(_rows_key(run), digests.astype("<u8").tobytes())


def write_seen(run: RunStore, digests: np.ndarray) -> None:
    """Keep what was seen before the run began."""
    run.store.write(_seen_key(run), digests.astype("<u8").tobytes())


def seen_before(run: RunStore) -> np.ndarray:
    """Digests, uint64, of the rows that were drawn before the run began; empty for a first run.

    A fork's past is its parent's, so what was seen before that is what was seen before the parent.
    """
    for current, origin in ancestry(run):
        digests = _read(current, _seen_key(current))
        if digests is not None:
            return digests
        if origin is None or not origin.fork:
            break
    return np.empty(0, np.uint64)


def unseen(source: RowSource, digests: np.ndarray) -> list[int]:
    """Numbers of the rows that are not among those seen, ascending."""
    rows: list[int] = np.flatnonzero(~np.isin(source.row_digests(), digests)).tolist()
    return rows


def seen_at(run: RunStore, cursor: Cursor, source: RowSource) -> np.ndarray | None:
    """Digests of the rows drawn by a run, up to a cursor of its commits, and by those before it.

    None where that cannot be told: the run kept no digests of its rows, and the data have changed.
    """
    before = seen_before(run)
    rows = _read(run, _rows_key(run))
    if rows is None:
        if source.as_recorded(cursor.digest).digest != cursor.digest:
            return None
        rows = source.row_digests()
    if cursor.size > len(rows):
        raise ObjectDamaged(
            f"A cursor of run {run.run} is of {cursor.size} rows, and its data have {len(rows)}."
        )
    fresh: Sequence[int] = ()
    if cursor.in_unseen:
        fresh = _fresh(rows, before)
    return np.union1d(before, rows[cursor.drawn(fresh)])


def fresh_rows_of(run: RunStore) -> list[int] | None:
    """The unseen rows with which a run began that has some first, by what it kept of its rows.

    None where it kept no digests of them: it does so at its end.
    """
    rows = _read(run, _rows_key(run))
    return None if rows is None else _fresh(rows, seen_before(run))


def _fresh(rows: np.ndarray, before: np.ndarray) -> list[int]:
    fresh: list[int] = np.flatnonzero(~np.isin(rows, before)).tolist()
    return fresh


def _read(run: RunStore, key: str) -> np.ndarray | None:
    try:
        data = run.store.read(key)
    except ObjectMissing:
        return None
    if len(data) % 8:
        raise ObjectDamaged(
            f"Object {key} is damaged: it has {len(data)} bytes, and 8 for each row."
        )
    return np.frombuffer(data, "<u8").astype(np.uint64)


def _rows_key(run: RunStore) -> str:
    return f"{run.run}/{ROWS}"


def _seen_key(run: RunStore) -> str:
    return f"{run.run}/{SEEN}"
