"""The safetensors files of a model directory: which tensors they hold, and any part of one.

A rank of a train engine reads the rows that it keeps and nothing else
(engines/train/model/loading.py). Files are read, not mapped: what was read is gone from memory once
it is copied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.batches.format import DTYPES
from storage.batches.tensors import NAMES, dtype_of
from storage.runs.weights import Part

if TYPE_CHECKING:
    from torch import Tensor

# As transformers looks for them: one file first, then the index of several.
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WINDOW_BYTES = 16 * 2**20  # read at once


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Where a tensor of a model directory lies."""

    name: str  # in the file
    file: Path
    dtype: str  # safetensors code
    shape: tuple[int, ...]
    start: int  # its first byte in the file

    @property
    def readable(self) -> bool:
        """Whether `read_part` knows its number format."""
        return self.dtype in NAMES

    @property
    def pieces(self) -> tuple[StoredTensor, ...]:
        """Those whose elements it has, one after the other: itself."""
        return (self,)


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedTensor:
    """Several tensors of a model directory, whose elements together are one of the model's.

    Example: the experts of a layer, each in tensors of its own.
    """

    pieces: tuple[StoredTensor, ...]  # in order
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of the first of them, in the file."""
        return self.pieces[0].name

    @property
    def parts(self) -> tuple[Part, ...]:
        """Their names and shapes."""
        return tuple(Part(name=one.name, shape=one.shape) for one in self.pieces)

    @property
    def file(self) -> Path:
        """Of the first of them."""
        return self.pieces[0].file


def stored_tensors(directory: Path) -> dict[str, StoredTensor] | None:
    """Every tensor of a model directory by its name in the files; None: it has no safetensors files.

    Raises ValueError naming the file that is missing, cut off or no safetensors file.
    """
    if (directory / SINGLE).exists():
        files = [directory / SINGLE]
    elif (directory / INDEX).exists():
        index = json.loads((directory / INDEX).read_text())
        files = [directory / name for name in sorted(set(index["weight_map"].values()))]
    else:
        return None
    return {name: tensor for file in files for name, tensor in _header(file).items()}


def read_part(tensor: StoredTensor | StackedTensor, begin: int, into: Tensor) -> None:
    """Fill `into` with the tensor's elements from `begin` on, cast to its number format.

    Args:
        tensor: Of any shape; its elements are counted row by row.
        begin: The first element that is read.
        into: Contiguous, on any device. As many elements are read as it has.

    Raises:
        ValueError: The file ends within them.
    """
    flat = into.view(-1)
    for at, values in _windows(tensor, begin, flat.numel()):
        flat[at : at + values.numel()].copy_(values)


def map_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Whole tensors in the files' number formats, by the same names; their bytes are the files'."""
    from safetensors import safe_open

    by_file: dict[Path, list[str]] = {}
    for name, tensor in tensors.items():
        by_file.setdefault(tensor.file, []).append(name)
    mapped: dict[str, Tensor] = {}
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as opened:
            mapped |= {name: opened.get_tensor(tensors[name].name) for name in names}
    return {name: mapped[name] for name in tensors}


def part_equals(tensor: StoredTensor | StackedTensor, begin: int, other: Tensor) -> bool:
    """Whether the tensor's elements from `begin` on are, cast, those of `other`; see `read_part`."""
    flat = other.view(-1)
    return all(
        bool((flat[at : at + values.numel()] == values.to(flat.device, flat.dtype)).all())
        for at, values in _windows(tensor, begin, flat.numel())
    )


def unfit(directory: Path, name: str, what: str) -> str:
    """The sentence about a tensor that keeps a model directory from being loaded."""
    return (
        f"{directory}: the tensor {name} {what}. Set model.path to a checkpoint whose config.json "
        "belongs to its weights."
    )


def _windows(
    tensor: StoredTensor | StackedTensor, begin: int, count: int
) -> Iterator[tuple[int, Tensor]]:
    """Elements begin .. begin + count in the files' number formats, some MiB at a time.

    With each window its place among them. Its memory is used again for the next one.
    """
    done = 0
    for piece in tensor.pieces:
        size = math.prod(piece.shape)
        own = min(size - begin, count - done)
        if own > 0:
            for at, values in _windows_of_one(piece, begin, own):
                yield done + at, values
            done += own
        begin = max(begin - size, 0)


def _windows_of_one(tensor: StoredTensor, begin: int, count: int) -> Iterator[tuple[int, Tensor]]:
    import torch

    dtype = dtype_of(tensor.dtype)
    step = min(count, WINDOW_BYTES // dtype.itemsize)
    if not step:
        return
    held = torch.empty(step, dtype=dtype)
    view = held.view(torch.uint8).numpy().data
    with open(tensor.file, "rb", buffering=0) as file:
        file.seek(tensor.start + begin * dtype.itemsize)
        for at in range(0, count, step):
            number = min(step, count - at)
            left = view[: number * dtype.itemsize]
            while left.nbytes:
                got = file.readinto(left)
                if not got:
                    raise ValueError(
                        f"{tensor.file} ends within the tensor {tensor.name}. Set model.path to a "
                        "complete checkpoint."
                    )
                left = left[got:]
            yield at, held[:number]


def _header(file: Path) -> dict[str, StoredTensor]:
    """Source: the safetensors format, https://github.com/huggingface/safetensors#format"""
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            size = file.stat().st_size
            if 8 + length > size:
                raise ValueError(f"its header would be {length} bytes long")
            header: dict[str, Any] = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        found = {name: _entry(name, file, 8 + length, size, header[name]) for name in header}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} cannot be read as safetensors: {error}. Set model.path to a complete "
            "checkpoint."
        ) from error
    return found


def _entry(name: str, file: Path, base: int, size: int, entry: dict[str, Any]) -> StoredTensor:
    first, last = entry["data_offsets"]
    tensor = StoredTensor(
        name=name,
        file=file,
        dtype=entry["dtype"],
        shape=tuple(entry["shape"]),
        start=base + first,
    )
    wanted = math.prod(tensor.shape) * DTYPES[tensor.dtype][0] if tensor.readable else last - first
    if last - first != wanted:
        raise ValueError(f"tensor {name} has {last - first} bytes, its shape {wanted}")
    if base + last > size:
        raise ValueError(f"it ends within the tensor {name}")
    return tensor
