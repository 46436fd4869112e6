"""A transformers model that computes each row of a batch alike whatever rows are beside it.

Rows join and leave between decoding steps, so a row's company depends on time; its bits must not.
Two things would make them so. A matrix product's kernel is chosen by the number of rows: here each
product takes blocks of one size, filled up with zeros (`RowBlocks`). And padding moves the places
over which attention sums: here a row's keys and values lie at their positions, in a width that
follows from the row's own length (`KeysAndValues`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from engines.models.attention import attention, causal_attention, rotate_by_sequence

ROWS = "refrain_rows"  # name in transformers' table of attention functions
# Rows of a matrix product. On a CPU 16 rows take little longer than one, whose time is that of
# reading the weights; a GPU's products of fewer than 64 rows do not either.
CPU_BLOCK, GPU_BLOCK = 16, 64
SHORTEST = 64  # positions for which a row gets room at first; doubled as it grows
FIRST_SLOTS = 8  # rows for which there is room at first; doubled as there are more


class RowBlocks(nn.Linear):
    """A linear layer that multiplies blocks of so many rows, always: a row's bits are its own."""

    block: int

    @classmethod
    def of(cls, linear: nn.Linear, block: int) -> RowBlocks:
        """With the weights of `linear`, not copies of them."""
        blocks = cls(1, 1, device="meta")
        blocks.in_features, blocks.out_features = linear.in_features, linear.out_features
        blocks.weight, blocks.bias = linear.weight, linear.bias
        blocks.block = block
        return blocks

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        rows = len(flat)
        padded = F.pad(flat, (0, 0, 0, -rows % self.block))
        parts = [F.linear(part, self.weight, self.bias) for part in padded.split(self.block)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole[:rows].view(*x.shape[:-1], self.out_features)


def block_of(model: PreTrainedModel) -> int:
    """Rows of one matrix product."""
    return CPU_BLOCK if model.device.type == "cpu" else GPU_BLOCK


def by_rows(model: PreTrainedModel) -> bool:
    """Make a model compute by rows, in place; whether that covers all of its products.

    It does not where weights are multiplied elsewhere than in linear layers, as those of experts,
    where scores are more than products, or where positions are rotated by the longest sequence of a
    batch.
    """
    block = block_of(model)
    covered = True
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(name, RowBlocks.of(module, block))
        elif not isinstance(module, nn.Embedding | RowBlocks):
            parameters = module.parameters(recurse=False)
            covered = covered and all(parameter.dim() < 2 for parameter in parameters)
    model.set_attn_implementation(ROWS)
    rotate_by_sequence(model)
    text = model.config.get_text_config()
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    scaling = getattr(text, "rope_parameters", None) or {}
    return covered and not capped and not sinks and scaling.get("rope_type") != "dynamic"


class Cached:
    """One row's place among the keys and values; None of it before they are computed."""

    __slots__ = ("length", "shelf", "slot")

    def __init__(self) -> None:
        self.length = 0  # positions that are filled
        self.shelf: _Shelf | None = None
        self.slot = 0  # of the shelf


class _Shelf:
    """Keys and values of rows of about one length: a slot each, position by position."""

    def __init__(self, width: int) -> None:
        self.width = width  # positions
        self.rows: list[Cached] = []  # by slot
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys, values [slots, G, width, D]

    def add(self, row: Cached) -> None:
        row.shelf, row.slot = self, len(self.rows)
        self.rows.append(row)
        for number, pair in self.layers.items():
            keys, values = (self._grown(each) for each in pair)
            # What another row left would meet a probability of 0, and 0 x inf is no number.
            keys[row.slot], values[row.slot] = 0, 0
            self.layers[number] = keys, values

    def _grown(self, held: Tensor) -> Tensor:
        if len(self.rows) <= len(held):
            return held
        return torch.cat([held, torch.zeros_like(held)])

    def remove(self, row: Cached) -> None:
        """The last row takes its slot."""
        last = self.rows.pop()
        if last is not row:
            for pair in self.layers.values():
                for each in pair:
                    each[row.slot] = each[last.slot]
            self.rows[row.slot], last.slot = last, row.slot
        row.shelf = None
        if not self.rows:
            self.layers.clear()

    def layer(self, number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, for rows of `key` [..., G, D] and `value` [..., G, E]."""
        if number not in self.layers:
            slots = max(FIRST_SLOTS, 1 << (len(self.rows) - 1).bit_length())
            keys, values = (
                each.new_zeros(slots, each.shape[-2], self.width, each.shape[-1])
                for each in (key, value)
            )
            self.layers[number] = keys, values
        return self.layers[number]


@dataclass(kw_only=True, slots=True)
class Prefill:
    """Whole sequences, one behind the other, each with the rows that begin with it."""

    lengths: list[int]
    rows: list[list[Cached]] = field(default_factory=list)  # by sequence; none: nothing is kept


@dataclass(kw_only=True, slots=True)
class Step:
    """One token of every row, shelf by shelf."""

    shelves: list[_Shelf]
    places: list[Tensor]  # by shelf: int64 [R], the position of each row's token
    masks: list[Tensor]  # by shelf: bool [R, 1, 1, width], the positions that each row sees


class KeysAndValues:
    """Of all rows that are being decoded."""

    def __init__(self) -> None:
        self._shelves: dict[int, _Shelf] = {}

    def place(self, row: Cached, length: int) -> None:
        """Make room for a row's first `length` positions; what it had before is kept."""
        width = max(SHORTEST, 1 << (length - 1).bit_length())
        old, slot = row.shelf, row.slot
        if old is not None and old.width >= width:
            return
        places = {}
        if old is not None:
            places = {n: (k[slot].clone(), v[slot].clone()) for n, (k, v) in old.layers.items()}
            old.remove(row)
        new = self._shelves.setdefault(width, _Shelf(width))
        new.add(row)
        for number, pair in places.items():
            wholes = new.layer(number, *(each.transpose(0, 1) for each in pair))
            for whole, part in zip(wholes, pair, strict=True):
                whole[row.slot, :, : part.shape[1]] = part

    def remove(self, row: Cached) -> None:
        """Forget a row."""
        if row.shelf is not None:
            row.shelf.remove(row)
        row.length = 0

    def step(self, device: torch.device) -> tuple[Step, list[Cached]]:
        """The next position of every row, and the rows in the order in which they are computed."""
        for shelf in list(self._shelves.values()):
            for row in list(shelf.rows):
                self.place(row, row.length + 1)
        shelves = [shelf for _, shelf in sorted(self._shelves.items()) if shelf.rows]
        places = [
            torch.tensor([row.length for row in shelf.rows], device=device) for shelf in shelves
        ]
        masks = [
            (torch.arange(shelf.width, device=device) <= place[:, None])[:, None, None]
            for shelf, place in zip(shelves, places, strict=True)
        ]
        rows = [row for shelf in shelves for row in shelf.rows]
        return Step(shelves=shelves, places=places, masks=masks), rows


def row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: Prefill | Step,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention with the signature that transformers asks for; writes keys and values on the way.

    Args:
        module: Its `layer_idx` says which layer's keys and values are meant.
        query: [1, H, T, D] of H heads; T tokens as `rows` has them, and others that fill up a block.
        key, value: [1, G, T, D]; H is a multiple of G.
        attention_mask: Not used; `rows` says what is attended to.
        rows: Whole sequences, or the next token of every row.
        scaling: Factor on the scores.
        sliding_window: Positions that each one attends to, itself included; None: all before it.
        softcap: Scores s become softcap x tanh(s / softcap).
        s_aux: [H], scores of each head's sink, a position without a value.

    Returns:
        [1, T, H, D], and None for the scores.
    """
    number = module.layer_idx
    assert isinstance(number, int)
    scores = Scores(scale=scaling, window=sliding_window, cap=softcap, sinks=s_aux)
    if isinstance(rows, Prefill):
        return _prefilled(number, query, key, value, rows, scores), None
    return _stepped(number, query, key, value, rows, scores), None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """How a layer scores; see engines/models/attention.py."""

    scale: float
    window: int | None
    cap: float | None
    sinks: Tensor | None


def _prefilled(
    layer: int, query: Tensor, key: Tensor, value: Tensor, prefill: Prefill, scores: Scores
) -> Tensor:
    total = sum(prefill.lengths)
    parts = [each[:, :, :total].split(prefill.lengths, 2) for each in (query, key, value)]
    outputs = []
    for number, (q, k, v) in enumerate(zip(*parts, strict=True)):
        out = causal_attention(
            q,
            k,
            v,
            scale=scores.scale,
            window=scores.window,
            cap=scores.cap,
            sinks=scores.sinks,
        )
        outputs.append(out.transpose(1, 2))
        for row in prefill.rows[number] if prefill.rows else ():
            assert row.shelf is not None
            keys, values = row.shelf.layer(layer, k[0].transpose(0, 1), v[0].transpose(0, 1))
            keys[row.slot, :, : k.shape[2]], values[row.slot, :, : k.shape[2]] = k[0], v[0]
    return _filled_up(outputs, query)


def _stepped(
    layer: int, query: Tensor, key: Tensor, value: Tensor, step: Step, scores: Scores
) -> Tensor:
    sizes = [len(place) for place in step.places]
    heads, size = query.shape[1], query.shape[3]
    tokens = [  # [R, H, D] of each shelf
        each[0, :, : sum(sizes)].transpose(0, 1).split(sizes) for each in (query, key, value)
    ]
    outputs = []
    for shelf, place, mask, q, k, v in zip(
        step.shelves, step.places, step.masks, *tokens, strict=True
    ):
        keys, values = shelf.layer(layer, k, v)
        number = torch.arange(len(place), device=place.device)
        keys[number, :, place], values[number, :, place] = k, v
        if scores.window is not None and scores.window < shelf.width:
            near = torch.arange(shelf.width, device=place.device) > place[:, None] - scores.window
            mask = mask & near[:, None, None]
        if scores.cap is not None or scores.sinks is not None:
            out = attention(
                q[:, :, None],
                keys[: len(place)],
                values[: len(place)],
                mask,
                scale=scores.scale,
                cap=scores.cap,
                sinks=scores.sinks,
            )
            outputs.append(out.reshape(1, len(place), heads, -1))
            continue
        groups = k.shape[1]  # whose query heads are taken as positions: no copies of keys
        with _one_thread(q.device):
            out = F.scaled_dot_product_attention(
                q.reshape(len(place), groups, heads // groups, size),
                keys[: len(place)],
                values[: len(place)],
                attn_mask=mask.expand(-1, -1, heads // groups, -1),
                scale=scores.scale,
            )
        outputs.append(out.reshape(1, len(place), heads, -1))
    return _filled_up(outputs, query)


def _filled_up(found: list[Tensor], query: Tensor) -> Tensor:
    """[1, T, H, E] of as many tokens as `query` [1, H, T, D] has, those at its end zeros."""
    missing = query.shape[2] - sum(part.shape[1] for part in found)
    return torch.cat([*found, query.new_zeros(1, missing, query.shape[1], found[0].shape[3])], 1)


@contextlib.contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """CPU attention leaves rows to threads, whose buffers begin at other offsets from a cache line.

    The products within round as their memory is aligned, so a row's bits would tell its thread.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def sequences_of(rows: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """The distinct sequences, in their order, and which of them each row is."""
    places: dict[tuple[int, ...], int] = {}
    which = [places.setdefault(tuple(row), len(places)) for row in rows]
    return [list(sequence) for sequence in places], which


AttentionInterface.register(ROWS, row_attention)
