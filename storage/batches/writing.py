"""Writing a batch: one object per call, never changed afterwards."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from storage.batches import tensors
from storage.batches.columns import COLUMNS, WIDER, kind_of
from storage.batches.format import DTYPES, Encoded, build
from storage.batches.ref_columns import ColumnRef, Source
from storage.batches.refs import BatchRef
from storage.batches.rows import RowIndex
from storage.objects.documents import digest

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from storage.objects.store import Store

NUMPY_CODES = {
    np.dtype(np.bool_): "BOOL",
    **{
        np.dtype(dtype): code for code, (_, dtype) in DTYPES.items() if code not in ("BOOL", "BF16")
    },
    np.dtype(np.uint8): "U8",
}


@dataclass(frozen=True, slots=True)
class Jagged:
    """A jagged column without torch: row i is `values[offsets[i]:offsets[i + 1]]`."""

    values: NDArray[np.generic]  # [T, ...]
    offsets: NDArray[np.integer]  # [N + 1], the first 0, the last T


def write_batch(store: Store, key: str, data: TensorDictBase | Mapping[str, object]) -> BatchRef:
    """Store the columns of a batch in one object and return the ref to all its rows.

    A column is a tensor [N, ...], a nested tensor, a NonTensorStack, a numpy array [N, ...], a
    `Jagged`, or a list of N rows: tensors, arrays or lists of numbers (jagged), numbers (dense),
    str, or JSON values. Columns declared in `storage.batches.columns` are checked against it, and
    lists take their type from it; token ids in int64 are stored as int32. Values are written as they
    are, without padding.

    Objects never change: writing the same bytes under the same key again is a no-op, other bytes
    go to a key of their own (`-<8 hex digits>` before the suffix), which the ref names. So a late
    attempt cannot damage what an earlier ref means. Raises ValueError for data that fit no column.
    """
    columns = {name: _encode(name, value) for name, value in _items(data)}
    rows = _common_rows(columns)
    head, values = build(columns, rows)
    key = _put(store, key, head, values)
    source = Source(key=key, rows=rows, head=len(head), digest=digest(head))
    index = RowIndex(range(rows))
    sources = (source,)
    return BatchRef(
        rows,
        {
            name: ColumnRef(
                kind=column.kind,
                dtype=column.dtype,
                shape=column.shape,
                sources=sources,
                index=index,
            )
            for name, column in columns.items()
        },
    )


def _put(store: Store, key: str, head: bytes, values: Sequence[memoryview]) -> str:
    """Create the object, under `key` if that is free or holds the same bytes."""
    total = len(head) + sum(view.nbytes for view in values)
    stem, dot, suffix = key.rpartition(".")
    while not store.create(key, [head, *values]):
        # The head holds the digests of all the rest.
        if store.size(key) == total and store.read_ranges([(key, 0, len(head))])[0] == head:
            return key
        token = uuid.uuid4().hex[:8]
        key = f"{stem}-{token}.{suffix}" if dot else f"{key}-{token}"
    return key


def _items(data: TensorDictBase | Mapping[str, object]) -> list[tuple[str, object]]:
    items = [(str(name), value) for name, value in data.items()]
    if not items:
        raise ValueError("A batch needs at least one column.")
    for name, _ in items:
        if name.startswith("_"):
            raise ValueError(f"Column {name!r}: names that begin with _ are the format's own.")
    return items


def _common_rows(columns: Mapping[str, Encoded]) -> int:
    rows = {name: _rows(column) for name, column in columns.items()}
    first, *others = rows
    for name in others:
        if rows[name] != rows[first]:
            raise ValueError(
                f"Column {name!r} has {rows[name]} rows, column {first!r} has {rows[first]}."
            )
    return rows[first]


def _rows(column: Encoded) -> int:
    if column.offsets is not None:
        return len(column.offsets) - 1
    size = column.element_bytes
    if size == 0:
        raise ValueError("A dense column whose rows hold nothing has no number of rows.")
    return column.values.nbytes // size


def _encode(name: str, value: object) -> Encoded:
    try:
        encoded = _column(name, value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"Column {name!r} cannot be stored: {error}.") from error
    declared = COLUMNS.get(name)
    if declared and WIDER.get(declared.dtype) == encoded.dtype:
        encoded = _narrow(name, encoded, declared.dtype)
    fits = declared is None or (
        encoded.kind == declared.kind and encoded.dtype in (declared.dtype, declared.wide)
    )
    if declared and not fits:
        raise ValueError(
            f"Column {name!r} is {declared.kind} {declared.dtype} ({declared.meaning}), "
            f"not {encoded.kind} {encoded.dtype}."
        )
    return encoded


def _narrow(name: str, encoded: Encoded, code: str) -> Encoded:
    """The same numbers in the narrower format `code`; ValueError for one that does not fit."""
    wide = encoded.values.view(DTYPES[encoded.dtype][1])
    values = wide.astype(DTYPES[code][1])
    if not np.array_equal(values, wide):
        row = int(wide[values != wide][0])
        raise ValueError(f"Column {name!r} is stored as {code}, which {row} does not fit.")
    return replace(encoded, dtype=code, values=values.view(np.uint8))


def _column(name: str, value: object) -> Encoded:
    if tensors.is_tensor(value):
        return tensors.encode(value)  # type: ignore[arg-type]
    if isinstance(value, Jagged):
        return _jagged(value)
    if isinstance(value, np.ndarray):
        return _dense(value)
    if not isinstance(value, list):
        rows = tensors.non_tensor_rows(value)
        if rows is None:
            raise ValueError(f"a {type(value).__name__} is no tensor, array or list")
        value = rows
    return _list(name, value)


def _list(name: str, rows: list[object]) -> Encoded:
    """A list with a value per row: its declared type, or else the one its values show."""
    declared = COLUMNS.get(name)
    kind = kind_of(name) or _kind_of(rows)
    code = declared.dtype if declared else None
    if kind == "json":
        return _texts("json", [json.dumps(row, separators=(",", ":")) for row in rows])
    if kind == "str":
        for number, row in enumerate(rows):
            if not isinstance(row, str):
                raise ValueError(f"row {number} is {row!r:.40}, no string")
        return _texts("str", [str(row) for row in rows])
    if kind == "dense":
        return _dense(_array(rows, code))
    if rows and all(tensors.is_tensor(row) for row in rows):
        return tensors.encode_rows(rows)  # type: ignore[arg-type]
    arrays = [row if isinstance(row, np.ndarray) else _array(row, code) for row in rows]
    lengths = np.array([len(array) for array in arrays], np.int64)
    if not arrays:
        arrays = [_array([], code)]
    elif any(array.dtype != arrays[0].dtype for array in arrays):
        # An empty or all-integer row among rows of numbers says nothing about the type.
        arrays = [array.astype(np.result_type(*arrays)) for array in arrays]
    offsets = np.concatenate([np.zeros(1, np.int64), lengths]).cumsum()
    return _jagged(Jagged(np.concatenate(arrays), offsets))


def _kind_of(rows: list[object]) -> str:
    if not rows:
        raise ValueError("an empty list shows no type; use an array or tensor of 0 rows")
    if all(isinstance(row, str) for row in rows):
        return "str"
    if all(isinstance(row, (bool, int, float, np.number)) for row in rows):
        return "dense"
    if all(isinstance(row, np.ndarray) or tensors.is_tensor(row) for row in rows):
        return "jagged"
    numbers = (bool, int, float)
    if all(isinstance(r, (list, tuple)) and all(isinstance(x, numbers) for x in r) for r in rows):
        return "jagged"
    return "json"


def _array(rows: object, code: str | None) -> NDArray[np.generic]:
    """Numbers as an array: of the declared type, else int64 or float32 (or bool)."""
    if code is not None:
        return np.array(rows, dtype=DTYPES[code][1])
    array = np.array(rows)
    if array.dtype == np.float64:
        return array.astype(np.float32)
    return array


def _dense(array: NDArray[np.generic]) -> Encoded:
    if array.ndim == 0:
        raise ValueError("an array without dimensions has no rows")
    return Encoded(
        kind="dense",
        dtype=_code(array),
        shape=tuple(array.shape[1:]),
        values=_bytes(array),
        offsets=None,
    )


def _jagged(column: Jagged) -> Encoded:
    values, offsets = column.values, column.offsets.astype(np.int64)
    if offsets.ndim != 1 or not len(offsets) or offsets[0] != 0 or offsets[-1] != len(values):
        raise ValueError(f"the row offsets do not run from 0 to the {len(values)} values")
    if bool((np.diff(offsets) < 0).any()):
        raise ValueError("the row offsets go down")
    return Encoded(
        kind="jagged",
        dtype=_code(values),
        shape=tuple(values.shape[1:]),
        values=_bytes(values),
        offsets=offsets,
    )


def _texts(kind: str, texts: list[str]) -> Encoded:
    raw = [text.encode() for text in texts]
    lengths = np.array([len(text) for text in raw], np.int64)
    return Encoded(
        kind="str" if kind == "str" else "json",
        dtype="U8",
        shape=(),
        values=np.frombuffer(b"".join(raw), np.uint8),
        offsets=np.concatenate([np.zeros(1, np.int64), lengths]).cumsum(),
    )


def _code(array: NDArray[np.generic]) -> str:
    code = NUMPY_CODES.get(array.dtype.newbyteorder("="))
    if code is None:
        raise ValueError(f"arrays of {array.dtype} are not stored")
    return code


def _bytes(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8)
