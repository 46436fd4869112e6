"""The safetensors files of a model directory: their tensors, and what they call each weight.

A rank of a train engine reads the rows that it keeps and nothing else
(engines/train/model/loading.py). Files are read, not mapped: what was read is gone from memory once
it is copied.

transformers renames weights as it loads them: what an image-text checkpoint calls
`model.language_model.layers.0.…` is `model.layers.0.…` of the text model inside. Its vision tower and
layers for multi-token prediction are in its files and no part of that model. Policy versions carry
the files' names and all that they hold, so that whoever reads the checkpoint reads a version.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.models.adapters import is_factor
from engines.models.checkpoints import build_empty, unfit
from engines.start_progress import report
from storage.batches.format import DTYPES
from storage.batches.tensors import NAMES, dtype_of
from storage.objects.documents import Digester
from storage.runs.weights import FileNames, Part

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

# As transformers looks for them: one file first, then the index of several.
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WINDOW_BYTES = 16 * 2**20  # read at once
# Buffers that older checkpoints hold and that models now compute; transformers passes over them too.
COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


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
        return tuple(Part(name=piece.name, shape=piece.shape) for piece in self.pieces)

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


def part_equals(tensor: StoredTensor | StackedTensor, begin: int, target: Tensor) -> bool:
    """Whether the tensor's elements from `begin` on are, cast, those of `target`; see `read_part`."""
    flat = target.view(-1)
    return all(
        bool((flat[at : at + values.numel()] == values.to(flat.device, flat.dtype)).all())
        for at, values in _windows(tensor, begin, flat.numel())
    )


def _windows(
    tensor: StoredTensor | StackedTensor, begin: int, count: int
) -> Iterator[tuple[int, Tensor]]:
    """Elements begin .. begin + count in the files' number formats, some MiB at a time.

    With each window its place among them. Its memory is used again for the next one.
    """
    position = 0
    for piece in tensor.pieces:
        size = math.prod(piece.shape)
        share = min(size - begin, count - position)
        if share > 0:
            for at, values in _windows_of_one(piece, begin, share):
                yield position + at, values
            position += share
        begin = max(begin - size, 0)


def _windows_of_one(tensor: StoredTensor, begin: int, count: int) -> Iterator[tuple[int, Tensor]]:
    import torch

    dtype = dtype_of(tensor.dtype)
    step = min(count, WINDOW_BYTES // dtype.itemsize)
    if not step:
        return
    buffer = torch.empty(step, dtype=dtype)
    view = buffer.view(torch.uint8).numpy().data
    with open(tensor.file, "rb", buffering=0) as file:
        file.seek(tensor.start + begin * dtype.itemsize)
        for at in range(0, count, step):
            number = min(step, count - at)
            window = view[: number * dtype.itemsize]
            while window.nbytes:
                nbytes = file.readinto(window)
                if not nbytes:
                    raise ValueError(
                        f"{tensor.file} ends within the tensor {tensor.name}. Set model.path to a "
                        "complete checkpoint."
                    )
                window = window[nbytes:]
            yield at, buffer[:number]


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
        tensors = {name: _entry(name, file, 8 + length, size, header[name]) for name in header}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} cannot be read as safetensors: {error}. Set model.path to a complete "
            "checkpoint."
        ) from error
    return tensors


def _entry(name: str, file: Path, base: int, size: int, entry: dict[str, Any]) -> StoredTensor:
    first, last = entry["data_offsets"]
    tensor = StoredTensor(
        name=name,
        file=file,
        dtype=entry["dtype"],
        shape=tuple(entry["shape"]),
        start=base + first,
    )
    nbytes = math.prod(tensor.shape) * DTYPES[tensor.dtype][0] if tensor.readable else last - first
    if last - first != nbytes:
        raise ValueError(f"tensor {name} has {last - first} bytes, its shape {nbytes}")
    if base + last > size:
        raise ValueError(f"it ends within the tensor {name}")
    return tensor


WEIGHTS, WORDS = ("*.safetensors",), ("*.json", "*.jinja", "*.model", "*.txt")


def digest_of(directory: Path, patterns: Sequence[str]) -> str:
    """Of the names and bytes of a model's files."""
    total = Digester()
    for path in sorted({path for pattern in patterns for path in directory.glob(pattern)}):
        total.update(f"{path.name} {path.stat().st_size}\n".encode())
        with open(path, "rb") as file:
            while window := file.read(WINDOW_BYTES):
                total.update(window)
                report(f"reading {path.name}, {file.tell() // 2**20} MiB")
    return total.digest()


@dataclass(frozen=True, kw_only=True)
class CheckpointNames:
    """Of a text model that is trained, by what its checkpoint's files say.

    Example: of an image-text checkpoint
        in_files = {"model.norm.weight": "model.language_model.norm.weight"}
        stacks = {"model.layers.0.mlp.experts.down_proj": (Part(…), …)}
        unused = {"model.visual.patch_embed.weight": StoredTensor(…)}
    """

    in_files: Mapping[str, str] = field(default_factory=dict)  # by the model's; those that differ
    stacks: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)  # as the files have them
    unused: Mapping[str, StoredTensor] = field(default_factory=dict)  # by the files' name

    def to_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A model's tensors by the files' names, and after them those that the model lacks.

        The latter are mapped: they take memory as they are read.
        """
        return self.renamed(tensors) | map_tensors(self.unused)

    def renamed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A model's tensors by the files' names."""
        return {self.in_files.get(name, name): tensor for name, tensor in tensors.items()}

    def untold(self, names: CheckpointNames) -> FileNames:
        """What tensors that are named as `names` says are in the files."""
        renamed = {
            target: name for target, name in self.in_files.items() if target not in names.in_files
        }
        return FileNames(renamed=renamed, stacks=self.stacks)

    def own(self, name: str) -> str | None:
        """The model's name of a tensor, which has that or the files'; None: the model lacks it."""
        return None if name in self.unused else self._own.get(name, name)

    def in_model(self, names: Iterable[str]) -> dict[str, str]:
        """The same of several, those left out that the model lacks."""
        return {name: target for name in names if (target := self.own(name)) is not None}

    @cached_property
    def _own(self) -> dict[str, str]:
        return {name: target for target, name in self.in_files.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchedTensors:
    """Where each weight of a model lies in the files of its directory."""

    # By the model's name; of names that are tied, one that the files lack has another's.
    tensors: Mapping[str, StoredTensor | StackedTensor]
    names: CheckpointNames


def checkpoint_names(directory: Path) -> CheckpointNames:
    """Of the model of a directory; none where its files hold weights otherwise than the model does.

    Raises ValueError as `match` does.
    """
    stored = stored_tensors(directory)
    matched = None if stored is None else match(directory, build_empty(directory), stored)
    return CheckpointNames() if matched is None else matched.names


def match(
    directory: Path, model: PreTrainedModel, stored: Mapping[str, StoredTensor]
) -> MatchedTensors | None:
    """Where the files have each name of the model; None where they hold some in another form.

    transformers may make a weight of several tensors. Such a one is found here if it has theirs one
    after the other, as experts that are stacked have.

    Raises ValueError naming a tensor that is missing, of another shape, or not of the model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    weights = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    matched: dict[str, StoredTensor | StackedTensor] = {}
    unknown: dict[str, StoredTensor] = {}
    parts: dict[str, dict[str, list[StoredTensor]]] = {}  # by the model's name and the pattern
    for name, tensor in stored.items():
        prefix = model.base_model_prefix
        target, converted = rename_source_key(name, renamings, converters, prefix, weights)
        if target not in weights and name in weights:  # as transformers does
            target, converted = name, None
        if target in matched or not tensor.readable:
            return None
        if target not in weights:
            unknown[name] = tensor
        elif converted is None:
            matched[target] = tensor
        else:
            parts.setdefault(target, {}).setdefault(converted, []).append(tensor)
    for target, by_pattern in parts.items():
        for pieces in by_pattern.values():  # as transformers does
            pieces.sort(key=lambda piece: dot_natural_key(piece.name))
        stack = _stack(by_pattern, converters)
        if stack is None or target in matched:
            return None
        matched[target] = stack
    if not parts:  # a mixture's files may have layers that no list of transformers names
        _check_unknown(directory, model, unknown)
    renamed = {
        target: tensor.name
        for target, tensor in matched.items()
        if target != tensor.name and isinstance(tensor, StoredTensor)
    }
    stacks = {
        target: tensor.parts
        for target, tensor in matched.items()
        if isinstance(tensor, StackedTensor)
    }
    bare = f"{model.base_model_prefix}."
    if all(name == target.removeprefix(bare) for target, name in renamed.items()):
        # Files of a model without its head: a version has one.
        stacks = {
            target: _below(bare if renamed else "", parts) for target, parts in stacks.items()
        }
        renamed = {}
    names = CheckpointNames(
        in_files=renamed,
        stacks=stacks,
        unused={name: tensor for name, tensor in unknown.items() if not _is_computed(name)},
    )
    for tied, weight in distinct_weights(model):
        source = next((matched[name] for name in tied if name in matched), None)
        if source is None:
            raise ValueError(unfit(directory, tied[0], "is not in its files"))
        for name in tied:
            if matched.setdefault(name, source).shape != tuple(weight.shape):
                raise ValueError(
                    unfit(
                        directory,
                        matched[name].name,
                        f"has shape {matched[name].shape} in {matched[name].file.name}, "
                        f"{tuple(weight.shape)} by config.json",
                    )
                )
    return MatchedTensors(tensors=matched, names=names)


def _below(prefix: str, parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(Part(name=prefix + part.name, shape=part.shape) for part in parts)


def _stack(
    by_pattern: Mapping[str, Sequence[StoredTensor]], converters: Iterable[WeightConverter]
) -> StackedTensor | None:
    """What transformers makes of tensors, by their patterns; None: it has not theirs in order."""
    converter = next(
        transform for transform in converters if set(by_pattern) <= set(transform.source_patterns)
    )
    lists = [by_pattern.get(pattern, ()) for pattern in converter.source_patterns]
    kinds = [
        (type(operation).__name__, getattr(operation, "dim", None))
        for operation in converter.operations
    ]
    if len({len(pieces) for pieces in lists}) != 1 or len(converter.target_patterns) != 1:
        return None
    # Each expert's tensors stand together: gate, up, gate, up.
    pieces = tuple(tensor for group in zip(*lists, strict=True) for tensor in group)
    shapes = {tensor.shape[1:] for tensor in pieces}
    if len(shapes) != 1:
        return None
    columns, rows = shapes.pop(), sum(tensor.shape[0] for tensor in pieces if tensor.shape)
    if kinds == [("Concatenate", 0)]:
        return StackedTensor(pieces=pieces, shape=(rows, *columns))
    stacked = kinds == [("MergeModulelist", 0)] and len(lists) == 1
    if not (stacked or kinds == [("MergeModulelist", 0), ("Concatenate", 1)]):
        return None
    experts = len(lists[0])
    return StackedTensor(pieces=pieces, shape=(experts, rows // experts, *columns))


def distinct_weights(model: PreTrainedModel) -> list[tuple[list[str], Tensor]]:
    """Every weight and stored buffer once, with its name, or names where weights are tied.

    Adapters are in no model's files.
    """
    distinct: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if is_factor(name):
            continue
        distinct.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(distinct.values())


def _is_computed(name: str) -> bool:
    return any(re.search(pattern, name) for pattern in COMPUTED)


def _check_unknown(directory: Path, model: PreTrainedModel, names: Iterable[str]) -> None:
    """Refuse tensors of which the model knows nothing, save those that it is known to pass over."""
    passed = model._keys_to_ignore_on_load_unexpected or ()
    for name in sorted(names):
        if not (_is_computed(name) or any(re.search(pattern, name) for pattern in passed)):
            what = "is in its files, but not in the model of config.json"
            raise ValueError(unfit(directory, name, what))
