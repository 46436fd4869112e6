"""Whether a model that vLLM runs computes with the tensors that it was given: some are read back.

vLLM's own list of what it loaded names what was handed to a loader, whatever became of it: of gpt-oss
it names sinks and experts that keep their old numbers (vLLM 0.32). So of each kind of tensor one is
chosen at each load, and pieces of it are looked for in what the model computes with. vLLM fuses
tensors, splits them over ranks and packs them for its kernels, and where one ends up is not asked of
it: every place of the same layer is looked at. A linear layer is read by what it gives for a unit
vector, which is a column of its weights in whatever layout.

Runs inside vLLM's worker processes, and imports nothing of vLLM.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engines.failures import WeightMismatch

_PIECE = 16  # elements next to each other
_PIECES = 8  # of a tensor, in its rows and again in columns
_TELLING = 4  # different numbers in a piece: ones and zeros are found anywhere
_SAMPLED = 1024  # elements of a parameter that tell whether it changed at all
_BLOCK = 1 << 22  # elements that are searched at once: a device that is nearly full has room for it
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadBack:
    """What was found of a load, by kind: a tensor's name with # for its numbers."""

    found: tuple[str, ...]
    # Computed into other numbers or packed, or too much alike to be told from others.
    unseen: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    values: Tensor  # [at most _PIECE]
    at: int  # where they stand in their tensor, or in their column


@dataclass(frozen=True, slots=True)
class _Chosen:
    name: str
    rows: list[_Piece]
    columns: list[list[_Piece]]  # the same of each column that is the first of a rank's share


class LoadCheck:
    """Of the part of a model that one rank holds, over its life."""

    def __init__(self, model: nn.Module, ranks: int = 1) -> None:
        """`ranks`: that tensors are split over."""
        self._model = model
        self._ranks = ranks
        self._found: set[str] = set()  # kinds that were found at some load
        self._drawn: dict[str, Tensor] | None = None  # what vLLM drew as it started
        self._random = random.Random(0)
        self._offered: dict[str, int] = {}
        self._chosen: dict[str, _Chosen] = {}

    def begin(self) -> None:
        """Before a load, while the model still has what it computed with."""
        self._offered, self._chosen = {}, {}
        if self._drawn is None:
            self._drawn = {name: _sampled(p) for name, p in self._model.named_parameters()}

    def watch(
        self, tensors: Iterable[tuple[str, Tensor]], unused: Container[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Hand on a version's tensors by name, and choose of each kind one, each as likely.

        unused: those that the model has no place for, such as layers for multi-token prediction.
        """
        for name, tensor in tensors:
            if name not in unused:
                self._consider(name, tensor)
            yield name, tensor

    def _consider(self, name: str, tensor: Tensor) -> None:
        kind = _NUMBER.sub("#", name)
        self._offered[kind] = self._offered.get(kind, 0) + 1
        if self._random.random() * self._offered[kind] < 1:
            self._chosen[kind] = _chosen(name, tensor, self._ranks)

    @torch.no_grad()
    def end(self) -> ReadBack:
        """After the load. WeightMismatch naming a tensor that the model does not compute with.

        That is one whose kind was found at an earlier load, or, at the first one, a parameter that
        still has what vLLM drew as it started.
        """
        kinds, unseen = [], []
        for kind, chosen in sorted(self._chosen.items()):
            telling = any(len(piece.values.unique()) >= _TELLING for piece in chosen.rows)
            if telling and self._holds(chosen):
                kinds.append(kind)
            elif telling and kind in self._found:
                raise _stale(chosen.name)
            else:
                unseen.append(kind)
        self._check_none_as_drawn()
        self._found.update(kinds)
        return ReadBack(found=tuple(kinds), unseen=tuple(unseen))

    def _holds(self, chosen: _Chosen) -> bool:
        places = list(self._places(chosen.name))
        for pieces in (chosen.rows, *chosen.columns):
            hits = (piece for piece in pieces if _among(piece, places))
            least = math.ceil(len(pieces) / (2 * self._ranks))
            if len(list(itertools.islice(hits, least))) == least:
                return True
        return False

    def _places(self, name: str) -> Iterator[Tensor]:
        """What modules of a tensor's layer compute with, each as [elements]."""
        number = _first_number(name)
        for path, module in self._model.named_modules():
            if _first_number(f"{path}.") != number:
                continue
            column = _column(module)
            packed = column is not None and hasattr(module, "cpu_linear")
            tensors = [] if packed else [*module.parameters(recurse=False)]
            tensors += [*module.buffers(recurse=False), *([] if column is None else [column])]
            yield from (each.detach().reshape(-1) for each in tensors if each.is_floating_point())

    def _check_none_as_drawn(self) -> None:
        for name, parameter in self._model.named_parameters():
            start = (self._drawn or {}).get(name)
            now = _sampled(parameter)
            if start is not None and len(now) > 1 and torch.equal(start, now):
                raise _stale(f"what it calls {name}")
        self._drawn = {}


def _stale(name: str) -> WeightMismatch:
    return WeightMismatch(
        f"vLLM says that it loaded the policy version, and computes with other numbers of {name}. "
        "Set rollout.engine = transformers, or another model."
    )


def _first_number(name: str) -> str:
    match = _NUMBER.search(name)
    return "" if match is None else match.group()


def _sampled(parameter: Tensor) -> Tensor:
    values = parameter.detach().reshape(-1)
    return values[:: max(1, len(values) // _SAMPLED)].clone()


def _chosen(name: str, tensor: Tensor, ranks: int) -> _Chosen:
    table = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    height, width = table.shape
    wide, high = (min(_PIECE, max(1, size // ranks)) for size in (width, height))
    rows = [
        _Piece(table[row, column : column + wide].clone(), row * width + column)
        for row, column in zip(_spread(height - 1), _spread(width - wide), strict=True)
    ]
    firsts = sorted({rank * width // ranks for rank in range(ranks)}) if tensor.dim() == 2 else []
    columns = [
        [_Piece(table[row : row + high, column].clone(), row) for row in _spread(height - high)]
        for column in firsts
    ]
    return _Chosen(name, rows, columns)


def _spread(last: int) -> list[int]:
    """_PIECES places from 0 to `last`."""
    return [last * place // (_PIECES - 1) for place in range(_PIECES)]


def _among(piece: _Piece, places: Sequence[Tensor]) -> bool:
    """Whether one of the places has it, most likely where the tensor has it: all is searched last."""
    return any(_stands(piece, each) for each in places) or any(
        _within(piece.values, each) for each in places
    )


def _stands(piece: _Piece, values: Tensor) -> bool:
    """Whether `values` [n] have the piece where its tensor has it, bit for bit."""
    there = values[piece.at : piece.at + len(piece.values)]
    expected = piece.values.to(device=there.device, dtype=there.dtype)
    bits = _BITS[there.element_size()]
    return len(there) == len(expected) and torch.equal(there.view(bits), expected.view(bits))


def _within(piece: Tensor, values: Tensor) -> bool:
    """Whether `values` [n] have the piece's numbers, bit for bit, one after the other.

    Its largest number is looked for, which is the rarest, and what stands around it compared where
    it is found: a GPU is waited for twice a block, and not once for each number.
    """
    starts = len(values) - len(piece) + 1
    if starts < 1:
        return False
    bits = _BITS[values.element_size()]  # compared in less than half the time on a CPU
    expected = piece.to(device=values.device, dtype=values.dtype)
    key = int(piece.float().abs().argmax())
    expected, values = expected.view(bits), values.view(bits)
    windows = values.unfold(0, len(expected), 1)  # [starts, len(piece)], no copy
    for first in range(0, starts, _BLOCK):
        part = values[first + key : min(first + _BLOCK, starts) + key]
        at = (part == expected[key]).nonzero()[:, 0] + first
        for some in at.split(max(1, _BLOCK // _PIECE)):
            if (windows[some] == expected).all(1).any():
                return True
    return False


def _column(module: nn.Module) -> Tensor | None:
    """The first column of a linear layer's weights, or of an output head's; None: it is neither."""
    method = getattr(module, "quant_method", None)
    head = type(module).__name__.endswith("LMHead")
    width = getattr(module, "embedding_dim" if head else "input_size", None)
    width = getattr(module, "input_size_per_partition", width)
    if method is None or width is None:
        return None
    like = next(iter(module.parameters(recurse=False)), None)
    if like is None:  # a layer for adapters, around one that has the weights
        return None
    unit = torch.zeros(1, width, dtype=like.dtype, device=like.device)
    unit[0, 0] = 1
    column: Tensor = method.apply(module, unit, bias=None)
    return column[0]
