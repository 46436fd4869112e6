"""What every source of prompts offers, and the words in which they refuse a row."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from storage.objects.documents import JsonValue, Row, canonical_row, plain

if TYPE_CHECKING:
    from pyarrow import Table

DIGEST_ROWS = 4096  # read at once to make a source's digest; the digest of some depends on it
TASK = "task"  # column with the name of a row's task, where there are several
READ_ROWS = 512  # read at once to make the digests of rows


class PromptSource(ABC):
    """Numbered rows. Safe to read from several threads."""

    name: str  # what people call it: a path, a dataset id, a task
    columns: tuple[str, ...]  # columns of the first row; a JSONL file may have others further on
    digest: str  # of the content: sha256 of the bytes of a file, or of what determines the rows

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def rows(self, indices: Sequence[int]) -> list[Row]:
        """The rows with these numbers, in this order; IndexError for a number out of range."""

    @abstractmethod
    def check_columns(self, needed: Iterable[str]) -> None:
        """ValueError that names the first row without a value in one of these columns."""

    def has_column(self, name: str) -> bool:
        """Whether any row has it: of a source whose rows may differ, not only the first."""
        return name in self.columns

    def as_recorded(self, digest: str) -> PromptSource:
        """The same rows with a digest of the kind of a recorded one, so that the two compare.

        Only a source whose digest was once made in another way has more kinds than one.
        """
        return self

    def row_digests(self, rows: range | None = None) -> np.ndarray:
        """What tells rows apart wherever they stand: uint64 [rows], of each row's content.

        rows: ascending, one after the other; None: all, whose digests are kept, 8 bytes a row.
        """
        return self._all_row_digests if rows is None else self._row_digests(rows)

    @cached_property
    def _all_row_digests(self) -> np.ndarray:
        digests = self._row_digests(range(len(self)))
        digests.setflags(write=False)
        return digests

    def _row_digests(self, rows: range) -> np.ndarray:
        """Made anew, of READ_ROWS rows in memory at once."""
        digests = np.empty(len(rows), np.uint64)
        for start in range(0, len(rows), READ_ROWS):
            for place, row in enumerate(self.rows(rows[start : start + READ_ROWS]), start):
                digests[place] = xxhash.xxh3_64_intdigest(canonical_row(row))
        return digests

    def _in_range(self, indices: Sequence[int]) -> None:
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(f"There is no row {index} in {self.name}: it has {len(self)}.")


class RowsInMemory(PromptSource):
    """Rows that are made once, such as a function's; which differ in their columns, perhaps."""

    def __init__(self, name: str, rows: list[Row]) -> None:
        """rows: at least one; the digest is that of their contents, in their order."""
        self.name = name
        self._rows = rows
        self.columns = tuple(rows[0])
        hasher = hashlib.sha256()
        for row in rows:
            hasher.update(canonical_row(row) + b"\n")
        self.digest = f"sha256:{hasher.hexdigest()}"

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        self._in_range(indices)
        return [self._rows[index] for index in indices]

    def has_column(self, name: str) -> bool:
        return any(name in row for row in self._rows)

    def check_columns(self, needed: Iterable[str]) -> None:
        named = ((row_name(index), row) for index, row in enumerate(self._rows))
        check_rows(named, self.name, needed)


def row_name(index: int) -> str:
    """What people call a row that lies in no file."""
    return f"Row {index}"


def check_rows(named: Iterable[tuple[str, Row]], source: str, needed: Iterable[str]) -> None:
    """What `check_columns` says of rows, each of which comes with its name, such as Row 3."""
    filled = tuple(needed)
    for name, row in named:
        for column in filled:
            if column not in row:
                raise missing_column(name, source, column, row)
        for column in filled:
            if row[column] is None:
                raise empty_value(name, source, column)


def missing_column(row_name: str, source: str, column: str, columns: Iterable[str]) -> ValueError:
    known = ", ".join(sorted(columns)) or "none"
    return ValueError(f"{row_name} of {source} has no column '{column}'; its columns are: {known}.")


def empty_value(row_name: str, source: str, column: str) -> ValueError:
    return ValueError(f"{row_name} of {source} has no value in column '{column}'.")


def first_null(table: Table, column: str) -> int | None:
    """Number of the first row with a null in a top-level column."""
    values = table[column]
    if not values.null_count:
        return None
    return values.is_null().to_pylist().index(True)


def plain_row(row: dict[str, Any], row_name: str) -> Row:
    columns: dict[str, JsonValue] = {}
    for column, value in row.items():
        try:
            columns[column] = plain(value)
        except TypeError as error:
            raise ValueError(
                f"{row_name} cannot be kept as JSON: {error}, in the column '{column}'. Write it as "
                "text, or leave the column out."
            ) from None
    return columns
