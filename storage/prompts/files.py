"""Prompts from files: JSONL and Parquet, local or at any fsspec address."""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING, Any

import fsspec

from storage.objects.json_values import Row
from storage.prompts.source import (
    PromptSource,
    check_rows,
    empty_value,
    first_null,
    missing_column,
    plain_row,
)

if TYPE_CHECKING:
    from pyarrow import Table

_BLOCK = 4 << 20  # bytes read at a time where a whole file is scanned
_KEPT_TABLES = 128 << 20  # bytes of decoded Parquet row groups that a source keeps


def locate(url: str) -> tuple[Any, str]:
    """File system and path of a file that exists."""
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ValueError(f"data.source.path is {url}, which cannot be opened: {error}.") from error
    if not filesystem.isfile(path):
        raise ValueError(f"data.source.path is {url}: there is no such file.")
    return filesystem, path


class JsonLines(PromptSource):
    """A file with one JSON object per line. Only the offsets of the lines are kept in memory."""

    def __init__(self, url: str) -> None:
        self.name = url
        self._filesystem, self._path = locate(url)
        self._starts, self._line_numbers = array("q"), array("q")
        hasher, position = hashlib.sha256(), 0
        for number, line in enumerate(self._lines(), start=1):
            hasher.update(line)
            if line.strip():
                self._starts.append(position)
                self._line_numbers.append(number)
            position += len(line)
        self._starts.append(position)
        if not len(self):
            raise ValueError(f"data.source.path is {url}: the file has no rows.")
        self.digest = f"sha256:{hasher.hexdigest()}"
        self.columns = tuple(self.rows([0])[0])

    def __len__(self) -> int:
        return len(self._line_numbers)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        self._in_range(indices)
        if isinstance(indices, range) and indices.step == 1 and indices:
            lines = self._following(indices)
        else:
            lines = self._filesystem.cat_ranges(
                [self._path] * len(indices),
                [self._starts[index] for index in indices],
                [self._starts[index + 1] for index in indices],
                on_error="raise",
            )
        return [self._parse(line, index) for line, index in zip(lines, indices, strict=True)]

    def _following(self, rows: range) -> list[bytes]:
        """The lines of rows that follow one another, in one request."""
        edges = self._starts[rows.start : rows.stop + 1]
        found = self._filesystem.cat_file(self._path, start=edges[0], end=edges[-1])
        return [found[a - edges[0] : b - edges[0]] for a, b in pairwise(edges)]

    def check_columns(self, needed: Iterable[str]) -> None:
        lines = (line for line in self._lines() if line.strip())
        rows = ((self._row_name(i), self._parse(line, i)) for i, line in enumerate(lines))
        check_rows(rows, self.name, needed)

    def has_column(self, name: str) -> bool:
        return name in self.columns or name in self._later_columns

    @cached_property
    def _later_columns(self) -> frozenset[str]:
        """Of all rows; the whole file is read for it, once."""
        lines = (line for line in self._lines() if line.strip())
        return frozenset(name for i, line in enumerate(lines) for name in self._parse(line, i))

    def _lines(self) -> Iterator[bytes]:
        with self._filesystem.open(self._path, "rb", block_size=_BLOCK) as stream:
            yield from stream

    def _row_name(self, index: int) -> str:
        return f"Row {index} (line {self._line_numbers[index]})"

    def _parse(self, line: bytes, index: int) -> Row:
        try:
            row = json.loads(line)
        except ValueError as error:  # broken JSON or broken UTF-8
            raise ValueError(
                f"{self._row_name(index)} of {self.name} is not JSON: {error}."
            ) from None
        if not isinstance(row, dict):
            raise ValueError(f"{self._row_name(index)} of {self.name} is not a JSON object.")
        return row


class ParquetRows(PromptSource):
    """A Parquet file, read by row groups; the groups used last are kept, up to a bound in bytes."""

    def __init__(self, url: str) -> None:
        import pyarrow
        from pyarrow import parquet

        self.name = url
        filesystem, path = locate(url)
        hasher = hashlib.sha256()
        with filesystem.open(path, "rb", block_size=_BLOCK) as stream:
            while block := stream.read(_BLOCK):
                hasher.update(block)
        self.digest = f"sha256:{hasher.hexdigest()}"
        try:
            self._file = parquet.ParquetFile(filesystem.open(path, "rb"))
        except pyarrow.ArrowInvalid as error:
            raise ValueError(
                f"data.source.path is {url}: this is not a Parquet file: {error}"
            ) from None
        self.columns = tuple(self._file.schema_arrow.names)
        groups = [self._file.metadata.row_group(g) for g in range(self._file.num_row_groups)]
        self._group_stops = array("q")
        for group in groups:
            self._group_stops.append((self._group_stops or [0])[-1] + group.num_rows)
        if not len(self):
            raise ValueError(f"data.source.path is {url}: the file has no rows.")
        self._tables: OrderedDict[int, Table] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return self._file.metadata.num_rows

    def rows(self, indices: Sequence[int]) -> list[Row]:
        self._in_range(indices)
        places: dict[int, list[int]] = {}  # row group -> positions in `indices`
        for place, index in enumerate(indices):
            places.setdefault(self._group_of(index), []).append(place)
        found: dict[int, Row] = {}
        for group, members in places.items():
            table, start = self._table(group), self._group_start(group)
            taken = table.take([indices[place] - start for place in members]).to_pylist()
            for place, row in zip(members, taken, strict=True):
                found[place] = plain_row(row, f"Row {indices[place]} of {self.name}")
        return [found[place] for place in range(len(indices))]

    def check_columns(self, needed: Iterable[str]) -> None:
        filled = tuple(needed)
        for column in filled:
            if column not in self.columns:
                raise missing_column("Row 0", self.name, column, self.columns)
        for group in range(self._file.num_row_groups):
            with self._lock:
                table = self._file.read_row_group(group, columns=list(filled))
            for column in filled:
                row = first_null(table, column)
                if row is not None:
                    number = self._group_start(group) + row
                    raise empty_value(f"Row {number}", self.name, column)

    def _group_of(self, index: int) -> int:
        return bisect_right(self._group_stops, index)

    def _group_start(self, group: int) -> int:
        return self._group_stops[group - 1] if group else 0

    def _table(self, group: int) -> Table:
        with self._lock:
            if group not in self._tables:
                self._tables[group] = self._file.read_row_group(group)
            self._tables.move_to_end(group)
            while len(self._tables) > 1 and self._kept_bytes() > _KEPT_TABLES:
                self._tables.popitem(last=False)
            return self._tables[group]

    def _kept_bytes(self) -> int:
        return sum(table.nbytes for table in self._tables.values())
