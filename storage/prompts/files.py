"""Prompts from files and folders of them: JSONL and Parquet, local or at any fsspec address."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from threading import Lock
from typing import IO, TYPE_CHECKING, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from storage.objects.documents import Row
from storage.prompts.source import (
    PromptSource,
    check_rows,
    empty_value,
    first_null,
    missing_column,
    plain_row,
    row_name,
)

if TYPE_CHECKING:
    from pyarrow import Table

PARQUET = ".parquet"
LINES = (".jsonl", ".ndjson", ".json")  # one JSON object per line
CODECS = {".gz": "gzip", ".zst": "zstd"}  # ending after one of LINES -> Arrow's name
READABLE = (PARQUET, *LINES, *(f"{lines}{end}" for lines in LINES for end in CODECS))
_BLOCK = 4 << 20  # bytes read at a time where a whole file is scanned
_MOST_LINE = 64 << 20  # bytes of a row of JSON; a longer line is no row but somebody's trap
_SPARED = 256 << 20  # bytes of the disk of temporary files that decompressed text leaves free
_MOST_DECODED = (
    8 << 30
)  # bytes of a row group in memory; a few hundred bytes may ask for any number
_BATCH = 1024  # rows of a group decoded at a time
_KEPT_TABLES = 128 << 20  # bytes of decoded Parquet row groups that a source keeps


def locate(url: str) -> tuple[Any, list[str]]:
    """File system and paths of what an address names: a file, or those in a folder or of a pattern.

    Of a folder the files that can be read, but no hidden ones and none of folders within; several
    files are in the order of their paths. ValueError where there is none.
    """
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
        if filesystem.isfile(path):
            return filesystem, [path]
        folder = filesystem.isdir(path)
        entries = filesystem.ls(path, detail=True) if folder else []
        if not folder and set("*?[") & set(path):
            entries = list(filesystem.glob(path, detail=True).values())
    except (ValueError, ImportError) as error:
        raise ValueError(f"data.source.path is {url}, which cannot be opened: {error}.") from error
    names = [entry["name"] for entry in entries if entry["type"] == "file"]
    paths = sorted(name for name in names if not folder or _is_data(name))
    if paths:
        return filesystem, paths
    if folder:
        raise ValueError(
            f"data.source.path is {url}: the folder holds no file that can be read "
            f"({', '.join(READABLE)}). For those of folders within it, give a pattern, such as "
            f"{url.rstrip('/')}/**/*.parquet."
        )
    raise ValueError(f"data.source.path is {url}: there is no such file.")


def _is_data(path: str) -> bool:
    """Whether a file of a folder holds rows; those of Spark and Hive that do not begin so."""
    return path.endswith(READABLE) and not path.rpartition("/")[2].startswith((".", "_"))


def open_file(filesystem: Any, path: str, name: str) -> PromptSource:
    """The rows of a file, by the ending of its path; ValueError where it is none that can be read.

    name: what people call it.
    """
    if not path.endswith(READABLE):
        raise ValueError(
            f"data.source.path is {name}: only files of {', '.join(READABLE)} can be read. Convert "
            "the file, and let its name end so."
        )
    if path.endswith(PARQUET):
        return ParquetRows(filesystem, path, name)
    return JsonLines(filesystem, path, name)


class Shards(PromptSource):
    """Several files, one after the other."""

    def __init__(self, name: str, parts: Sequence[PromptSource]) -> None:
        self.name = name
        self.parts = parts
        self._stops = array("q", accumulate(map(len, parts)))
        self.columns = parts[0].columns
        digests = json.dumps([part.digest for part in parts]).encode()
        self.digest = f"sha256:{hashlib.sha256(digests).hexdigest()}"

    def __len__(self) -> int:
        return self._stops[-1]

    def rows(self, indices: Sequence[int]) -> list[Row]:
        self._in_range(indices)
        places: dict[int, list[int]] = {}  # part -> positions in `indices`
        for place, index in enumerate(indices):
            places.setdefault(bisect_right(self._stops, index), []).append(place)
        rows: dict[int, Row] = {}
        for part, members in places.items():
            start = self._stops[part - 1] if part else 0
            wanted = [indices[place] - start for place in members]
            rows |= zip(members, self.parts[part].rows(_as_range(wanted)), strict=True)
        return [rows[place] for place in range(len(indices))]

    def check_columns(self, needed: Iterable[str]) -> None:
        filled = tuple(needed)
        for part in self.parts:
            part.check_columns(filled)


def _as_range(indices: list[int]) -> Sequence[int]:
    """The same, as a range where they follow one another."""
    run = range(indices[0], indices[0] + len(indices))
    return run if indices == list(run) else indices


class JsonLines(PromptSource):
    """A file with one JSON object per line. Only the offsets of the lines are kept in memory.

    Of a compressed file the text lies in a temporary one, since its lines cannot be found otherwise.
    """

    def __init__(self, filesystem: Any, path: str, name: str) -> None:
        self.name = name
        self._filesystem, self._path = filesystem, path
        if codec := CODECS.get(path[path.rindex(".") :]):
            self._text = _decompressed(filesystem, path, codec, name)
            # By the descriptor: the file has no name, so that it goes with this object.
            self._filesystem = LocalFileSystem()
            self._path = f"/proc/self/fd/{self._text.fileno()}"
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
            raise ValueError(f"data.source.path is {name}: the file has no rows.")
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
            while line := stream.readline(_MOST_LINE + 1):
                if len(line) > _MOST_LINE:
                    raise _too_long(self.name)
                yield line

    def _row_name(self, index: int) -> str:
        return f"Row {index} (line {self._line_numbers[index]})"

    def _parse(self, line: bytes, index: int) -> Row:
        if index == 0 and line.lstrip().startswith(b"["):
            raise ValueError(
                f"data.source.path is {self.name}, which begins with a JSON array. Write one object "
                "per line."
            )
        try:
            row = json.loads(line)
        except ValueError as error:  # broken JSON or UTF-8
            raise ValueError(
                f"{self._row_name(index)} of {self.name} is not JSON: {error}."
            ) from None
        except RecursionError:
            raise ValueError(
                f"{self._row_name(index)} of {self.name} has lists or objects within each other too "
                "deep to be read. Write such a value as a text."
            ) from None
        if not isinstance(row, dict):
            raise ValueError(f"{self._row_name(index)} of {self.name} is not a JSON object.")
        return row


class ParquetRows(PromptSource):
    """A Parquet file, read by row groups; the groups used last are kept, up to a bound in bytes."""

    def __init__(self, filesystem: Any, path: str, name: str) -> None:
        import pyarrow
        from pyarrow import parquet

        self.name = name
        hasher = hashlib.sha256()
        with filesystem.open(path, "rb", block_size=_BLOCK) as stream:
            while block := stream.read(_BLOCK):
                hasher.update(block)
        self.digest = f"sha256:{hasher.hexdigest()}"
        try:
            self._file = parquet.ParquetFile(filesystem.open(path, "rb"))
        except pyarrow.ArrowInvalid as error:
            raise ValueError(
                f"data.source.path is {name}: this is not a Parquet file: {error}"
            ) from None
        self.columns = tuple(self._file.schema_arrow.names)
        groups = [self._file.metadata.row_group(g) for g in range(self._file.num_row_groups)]
        self._group_stops = array("q")
        for group in groups:
            self._group_stops.append((self._group_stops or [0])[-1] + group.num_rows)
        if not len(self):
            raise ValueError(f"data.source.path is {name}: the file has no rows.")
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
            wanted = _as_range([indices[place] - start for place in members])
            # By slices: Arrow takes no rows of columns of string views.
            if isinstance(wanted, range):
                taken = table.slice(wanted.start, len(wanted)).to_pylist()
            else:
                taken = [table.slice(row, 1).to_pylist()[0] for row in wanted]
            for place, row in zip(members, taken, strict=True):
                found[place] = plain_row(row, f"{row_name(indices[place])} of {self.name}")
        return [found[place] for place in range(len(indices))]

    def check_columns(self, needed: Iterable[str]) -> None:
        filled = tuple(needed)
        for column in filled:
            if column not in self.columns:
                raise missing_column("Row 0", self.name, column, self.columns)
        for group in range(self._file.num_row_groups):
            with self._lock:
                table = self._decoded(group, list(filled))
            for column in filled:
                row = first_null(table, column)
                if row is not None:
                    number = self._group_start(group) + row
                    raise empty_value(row_name(number), self.name, column)

    def _group_of(self, index: int) -> int:
        return bisect_right(self._group_stops, index)

    def _group_start(self, group: int) -> int:
        return self._group_stops[group - 1] if group else 0

    def _table(self, group: int) -> Table:
        with self._lock:
            if group not in self._tables:
                self._tables[group] = self._decoded(group)
            self._tables.move_to_end(group)
            while len(self._tables) > 1 and self._kept_bytes() > _KEPT_TABLES:
                self._tables.popitem(last=False)
            return self._tables[group]

    def _decoded(self, group: int, columns: list[str] | None = None) -> Table:
        """A row group; ValueError where it is damaged, or far larger than its file."""
        import pyarrow

        batches, held = [], 0
        try:
            for batch in self._file.iter_batches(_BATCH, [group], columns):
                batches.append(batch)
                held += sum(map(_own_bytes, batch.columns))
                if held > _MOST_DECODED:
                    raise ValueError(
                        f"Row group {group} of {self.name} takes more than "
                        f"{_MOST_DECODED / 2**30:.3g} GiB of memory. Write the file in smaller row "
                        "groups."
                    )
        except (pyarrow.ArrowException, OSError, MemoryError) as error:
            reason = str(error).partition("\n")[0][:200]
            raise ValueError(
                f"Row group {group} of {self.name} cannot be read: {reason}."
            ) from error
        if not batches:
            return self._file.read_row_group(group, columns=columns)
        return pyarrow.Table.from_batches(batches)

    def _kept_bytes(self) -> int:
        return sum(table.nbytes for table in self._tables.values())


def _own_bytes(column: Any) -> int:
    """Bytes of a column's rows; a dictionary is there once for all batches."""
    import pyarrow

    return int((column.indices if pyarrow.types.is_dictionary(column.type) else column).nbytes)


def _too_long(name: str) -> ValueError:
    return ValueError(
        f"data.source.path is {name}, with a line of more than {_MOST_LINE >> 20} MiB, which is no "
        "row of JSON. Write one object per line."
    )


def _decompressed(filesystem: Any, path: str, codec: str, name: str) -> IO[bytes]:
    """The text of a compressed file, in a temporary file; ValueError where it is damaged."""
    import pyarrow

    text = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the source)
    try:
        with (
            filesystem.open(path, "rb", block_size=_BLOCK) as stream,
            pyarrow.CompressedInputStream(stream, codec) as lines,
        ):
            line = 0  # bytes since the last line began
            while block := lines.read(_BLOCK):
                end = block.rfind(b"\n")
                line = line + len(block) if end < 0 else len(block) - end - 1
                if line > _MOST_LINE:
                    raise _too_long(name)
                disk = os.fstatvfs(text.fileno())
                if disk.f_bavail * disk.f_frsize < _SPARED + len(block):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                text.write(block)
            text.flush()
    except OSError as error:  # Arrow's for damage, or a full disk
        raise ValueError(
            f"data.source.path is {name}, which cannot be decompressed as {codec} into "
            f"{tempfile.gettempdir()}: {error}."
        ) from None
    return text
