"""Columns as torch tensors, and tensors as columns. The only part of a batch that needs torch."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from storage.batches.format import DTYPES, Encoded

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from storage.batches.reading import ReadColumn

# safetensors code of each torch dtype, by the dtype's name
CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
}
NAMES = {code: name for name, code in CODES.items()}


def code_of(dtype: torch.dtype) -> str:
    """safetensors' code of a torch dtype. Raises ValueError for one that is not stored."""
    name = str(dtype).removeprefix("torch.")
    if name not in CODES:
        raise ValueError(f"Tensors of {dtype} are not stored; use one of {', '.join(CODES)}.")
    return CODES[name]


@cache
def dtype_of(code: str) -> torch.dtype:
    """The torch dtype of a safetensors code."""
    import torch

    return next(
        value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype) and name == NAMES[code]
    )


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes, copied only if it is on a device or not contiguous."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # Not numpy(): it takes from the memory below a tensor for good that it can be given back.
    return np.from_dlpack(flat.view(torch.uint8)) if flat.numel() else np.zeros(0, np.uint8)


def tensor_of(values: np.ndarray, code: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over the bytes `values`, without a copy."""
    import torch

    if values.nbytes == 0:
        return torch.empty(shape, dtype=dtype_of(code))
    return torch.from_numpy(values).view(dtype_of(code)).view(shape)


def is_tensor(value: object) -> bool:
    """Whether it is a torch tensor, without importing torch to find out."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)


def non_tensor_rows(value: object) -> list[object] | None:
    """The rows of a NonTensorStack (or of its list view); None if it is none."""
    if "tensordict" not in sys.modules:
        return None
    from tensordict import NonTensorData, NonTensorStack

    return list(value.tolist()) if isinstance(value, (NonTensorStack, NonTensorData)) else None


def encode(tensor: torch.Tensor) -> Encoded:
    """A dense tensor [N, ...], or a nested one whose second dimension is ragged."""
    if not tensor.is_nested:
        if tensor.dim() == 0:
            raise ValueError("a tensor without dimensions has no rows")
        return Encoded(
            kind="dense",
            dtype=code_of(tensor.dtype),
            shape=tuple(tensor.shape[1:]),
            values=bytes_of(tensor),
            offsets=None,
        )
    from torch.nested._internal.nested_tensor import NestedTensor

    if not isinstance(tensor, NestedTensor) or tensor.lengths() is not None:
        return encode_rows(list(tensor.unbind()))
    values, offsets = tensor.values(), tensor.offsets().cpu().numpy().astype(np.int64)
    if tensor._ragged_idx != 1:
        raise ValueError("only a nested tensor's first dimension after the rows may be ragged")
    values = values[int(offsets[0]) : int(offsets[-1])]
    return Encoded(
        kind="jagged",
        dtype=code_of(values.dtype),
        shape=tuple(values.shape[1:]),
        values=bytes_of(values),
        offsets=offsets - offsets[0],
    )


def encode_rows(rows: list[torch.Tensor]) -> Encoded:
    """One tensor per row, of lengths of their own."""
    import torch

    if len({row.dtype for row in rows}) != 1 or any(row.dim() == 0 for row in rows):
        raise ValueError("a list of tensors needs one dtype and at least one dimension")
    values = torch.cat(rows)
    lengths = np.array([len(row) for row in rows], np.int64)
    return Encoded(
        kind="jagged",
        dtype=code_of(values.dtype),
        shape=tuple(values.shape[1:]),
        values=bytes_of(values),
        offsets=np.concatenate([np.zeros(1, np.int64), lengths]).cumsum(),
    )


def to_tensordict(rows: int, columns: dict[str, ReadColumn]) -> TensorDict:
    """A TensorDict of batch size [rows]. Columns of equal lengths share their offsets tensor:
    torch refuses arithmetic between nested tensors that do not.
    """
    import torch
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    shared: dict[bytes, torch.Tensor] = {}
    found: dict[str, object] = {}
    for name, column in columns.items():
        if column.kind == "json" and rows:
            # Each row is wrapped, for a row that is a list would be taken for a stack of its own.
            found[name] = NonTensorStack(*map(NonTensorData, column.rows()))
            continue
        if column.kind in ("str", "json"):
            found[name] = NonTensorStack.from_list(column.rows())  # type: ignore[arg-type]
            continue
        if column.offsets is None:
            found[name] = tensor_of(column.values, column.dtype, (rows, *column.shape))
            continue
        elements = tensor_of(column.values, column.dtype, (int(column.offsets[-1]), *column.shape))
        name_of_offsets = column.offsets.tobytes()
        if name_of_offsets not in shared:
            shared[name_of_offsets] = torch.from_numpy(column.offsets)
        lengths = np.diff(column.offsets)
        found[name] = torch.nested.nested_tensor_from_jagged(
            elements,
            shared[name_of_offsets],
            min_seqlen=int(lengths.min(initial=0)) if rows else 0,
            max_seqlen=int(lengths.max(initial=0)),
        )
    return TensorDict(found, batch_size=[rows])


assert set(NAMES) == set(DTYPES)
