"""The format of a batch object: safetensors, with what a reader of single rows needs up front.

The object begins with its *head*: the safetensors header, then for each jagged column its row
offsets and for every column one checksum per row. The values follow, each column in one piece.
A ref holds the head's size and digest, so the head vouches for the offsets, the row checksums and
the column digests, and those for the values. docs/decisions/storage-format.md has the reasons.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from storage.batches.columns import Kind
from storage.objects.documents import digest

VERSION = 1
ALIGN = 64  # bytes; the values begin at a multiple, so that mapped tensors are aligned
OFFSETS, SUMS, PAD = "_row_offsets.", "_row_checksums.", "_pad"

# safetensors code: (bytes, numpy dtype that holds the bits)
DTYPES: dict[str, tuple[int, str]] = {
    "BOOL": (1, "u1"),
    "U8": (1, "u1"),
    "I8": (1, "i1"),
    "I16": (2, "<i2"),
    "U16": (2, "<u2"),
    "F16": (2, "<f2"),
    "BF16": (2, "<u2"),
    "I32": (4, "<i4"),
    "U32": (4, "<u4"),
    "F32": (4, "<f4"),
    "I64": (8, "<i8"),
    "U64": (8, "<u8"),
    "F64": (8, "<f8"),
}

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A column as it is stored."""

    kind: Kind
    dtype: str  # safetensors code of the values
    shape: tuple[int, ...]  # of one row (dense), or of one element of a row (others)
    values: Bytes  # every row's bytes, one after the other
    offsets: Offsets | None  # [N + 1], in elements; None for dense

    @property
    def element_bytes(self) -> int:
        return DTYPES[self.dtype][0] * int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredColumn:
    """Where an object keeps a column. Positions are bytes from the object's start."""

    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    digest: str  # of the values
    offsets: Offsets | None  # [N + 1], in elements
    sums: NDArray[np.uint32]  # [N], checksum of each row's bytes

    def byte_offsets(self) -> Offsets:
        """[N + 1]: where each row's bytes begin and end in the object."""
        size = DTYPES[self.dtype][0] * int(np.prod(self.shape, dtype=np.int64))
        if self.offsets is None:
            return self.start + size * np.arange(len(self.sums) + 1, dtype=np.int64)
        return self.start + size * self.offsets


def row_checksums(values: Bytes, edges: Offsets, kind: Kind) -> NDArray[np.uint32]:
    """The low 32 bits of xxh3 of each row; row i is `values[edges[i]:edges[i + 1]]`.

    Dense rows of at most 8 bytes (a reward, an id) are mixed as integers instead, all at once.
    """
    lengths = np.diff(edges)
    rows = len(lengths)
    if rows == 0:
        return np.zeros(0, np.uint32)
    width = int(lengths[0])
    if kind == "dense" and 0 < width <= 8:
        words = np.zeros((rows, 8), np.uint8)
        words[:, :width] = values[edges[0] : edges[-1]].reshape(rows, width)
        return _mix(words.view("<u8").ravel())
    view = np.ascontiguousarray(values).data
    hash64 = xxhash.xxh3_64_intdigest
    ends = edges.tolist()
    found = [hash64(view[a:b]) for a, b in pairwise(ends)]
    return (np.array(found, np.uint64) & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """The upper half of splitmix64 of each word (Steele et al., 2014)."""
    mixed = words + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)


def build(columns: dict[str, Encoded], rows: int) -> tuple[bytes, list[memoryview]]:
    """The head and the pieces of the values, in order: joined, they are the object."""
    indices: dict[str, NDArray[np.generic]] = {}
    described: dict[str, dict[str, object]] = {}
    seen: list[tuple[Offsets, str]] = []
    for name, column in columns.items():
        offsets_name = None
        if column.offsets is not None:
            for known, known_name in seen:  # columns over the same tokens share their offsets
                if np.array_equal(known, column.offsets):
                    offsets_name = known_name
            if offsets_name is None:
                offsets_name = f"{OFFSETS}{len(seen)}"
                seen.append((column.offsets, offsets_name))
                indices[offsets_name] = column.offsets.astype("<i8", copy=False)
        described[name] = {
            "kind": column.kind,
            "offsets": offsets_name,
            "digest": digest(column.values.data),
        }
    for name, column in columns.items():
        indices[f"{SUMS}{name}"] = row_checksums(column.values, _edges(column, rows), column.kind)
    note = json.dumps({"version": VERSION, "rows": rows, "columns": described})
    return _join(note, indices, columns, rows)


def _edges(column: Encoded, rows: int) -> Offsets:
    if column.offsets is not None:
        return column.offsets * column.element_bytes
    return np.arange(rows + 1, dtype=np.int64) * column.element_bytes


def _join(
    note: str, indices: dict[str, NDArray[np.generic]], columns: dict[str, Encoded], rows: int
) -> tuple[bytes, list[memoryview]]:
    header: dict[str, object] = {"__metadata__": {"format": "pt", "refrain": note}}
    at = 0

    def place(name: str, dtype: str, shape: Sequence[int], nbytes: int) -> None:
        nonlocal at
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes

    for name, array in indices.items():
        place(name, "I64" if array.itemsize == 8 else "U32", array.shape, array.nbytes)
    padding = -at % ALIGN
    if padding:
        place(PAD, "U8", [padding], padding)
    # Widest elements first: each column then begins at a multiple of its element's size.
    order = sorted(columns, key=lambda name: -DTYPES[columns[name].dtype][0])
    for name in order:
        column = columns[name]
        first = rows if column.offsets is None else int(column.offsets[-1])
        place(name, column.dtype, (first, *column.shape), column.values.nbytes)
    head = head_of(header)
    head += b"".join(array.data.cast("B") for array in indices.values() if array.size)
    return head + bytes(padding), [columns[name].values.data for name in order]


def head_of(header: Mapping[str, object]) -> bytes:
    """What a safetensors file begins with; its tensors begin at a multiple of ALIGN bytes.

    Source: the safetensors format, https://github.com/huggingface/safetensors#format
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    return len(text).to_bytes(8, "little") + text


def parse(head: memoryview, rows: int | None = None) -> dict[str, StoredColumn]:
    """The columns of an object, from its head (whose digest the caller has checked).

    The digest says that these are the bytes that were referred to, not that they make sense: sizes,
    places and offsets are checked against each other, so that no row reads another one's bytes.

    Args:
        head: of the object, or all of it.
        rows: that a reference says it has; None: what the head says.

    Raises ValueError when the head is none of this format, or of a later version of it.
    """
    size = int.from_bytes(head[:8], "little")
    base = 8 + size
    if base > head.nbytes:
        raise ValueError(f"its header of {size} bytes is longer than its head")
    try:
        header = json.loads(bytes(head[8:base]))
        note = json.loads(header["__metadata__"]["refrain"])
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if note["version"] != VERSION:
        raise ValueError(f"it has format version {note['version']}; this one reads {VERSION}")
    count = _natural(note["rows"], "its number of rows")
    if rows is not None and count != rows:
        raise ValueError(f"it holds {count} rows, the reference says {rows}")
    places = {name: _place(name, entry) for name, entry in header.items() if name != "__metadata__"}
    _check_apart(places)

    def index(name: str, dtype: str, length: int) -> NDArray[np.generic]:
        start, stop, code, shape = places[name]
        if (code, shape) != ({"<i8": "I64", "<u4": "U32"}[dtype], (length,)):
            raise ValueError(f"{name} is {code} {list(shape)}, not {length} numbers of {dtype}")
        if base + stop > head.nbytes:
            raise ValueError(f"{name} ends at byte {base + stop}, after the head")
        return np.frombuffer(head[base + start : base + stop], dtype=dtype)

    columns = {}
    for name, described in note["columns"].items():
        start, stop, dtype, (first, *shape) = places[name]
        kind, offsets = described["kind"], None
        if kind not in ("dense", "jagged", "str", "json"):
            raise ValueError(f"column {name!r} is of kind {kind!r}")
        if (kind == "dense") != (described["offsets"] is None):
            raise ValueError(
                f"column {name!r} is {kind}, and its offsets are {described['offsets']}"
            )
        if described["offsets"] is not None:
            offsets = index(described["offsets"], "<i8", count + 1).astype(np.int64)
            _check_offsets(name, offsets, first)
        elif first != count:
            raise ValueError(f"column {name!r} has {first} rows of {count}")
        columns[name] = StoredColumn(
            kind=kind,
            dtype=dtype,
            shape=tuple(shape),
            start=base + start,
            stop=base + stop,
            digest=described["digest"],
            offsets=offsets,
            sums=index(f"{SUMS}{name}", "<u4", count).astype(np.uint32),
        )
    return columns


def _natural(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{what} is {value!r:.40}")
    return value


def _place(name: str, entry: dict[str, object]) -> tuple[int, int, str, tuple[int, ...]]:
    """Start and stop, safetensors code and shape of what a header lists; they must agree."""
    bounds, sizes, dtype = entry["data_offsets"], entry["shape"], entry["dtype"]
    if not isinstance(bounds, list) or len(bounds) != 2 or not isinstance(sizes, list):
        raise ValueError(f"{name} has the data offsets {bounds!r:.40} and the shape {sizes!r:.40}")
    if dtype not in DTYPES or not sizes:
        raise ValueError(f"{name} is {dtype!r:.40} of the shape {sizes!r:.40}")
    start, stop = (_natural(bound, f"a data offset of {name}") for bound in bounds)
    shape = tuple(_natural(one, f"a size of {name}") for one in sizes)
    wanted = math.prod(shape) * DTYPES[str(dtype)][0]
    if stop - start != wanted:
        raise ValueError(
            f"{name} takes the bytes {start} to {stop}; its shape {sizes!r:.40} needs {wanted}"
        )
    if math.prod(size or 1 for size in shape) * DTYPES[str(dtype)][0] >= 2**63:
        raise ValueError(f"{name} has the shape {sizes!r:.40}, more than there can be")
    return start, stop, str(dtype), shape


def _check_apart(places: dict[str, tuple[int, int, str, tuple[int, ...]]]) -> None:
    """Raise ValueError where the bytes of two overlap."""
    ordered = sorted((start, stop, name) for name, (start, stop, *_) in places.items())
    for (_, stop, name), (start, _, other) in pairwise(one for one in ordered if one[0] < one[1]):
        if start < stop:
            raise ValueError(f"{name} ends at byte {stop}, after {other} begins at {start}")


def _check_offsets(name: str, offsets: Offsets, elements: int) -> None:
    """Raise ValueError unless row offsets begin at 0, never decrease, and end at the last element."""
    if offsets[0] != 0:
        raise ValueError(f"the row offsets of column {name!r} begin at {offsets[0]}, not 0")
    backward = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(backward):
        row = int(backward[0])
        raise ValueError(
            f"the row offsets of column {name!r} go back in row {row}, from {offsets[row]} to "
            f"{offsets[row + 1]}"
        )
    if offsets[-1] != elements:
        raise ValueError(
            f"the row offsets of column {name!r} end at {offsets[-1]}; it has {elements} elements"
        )
