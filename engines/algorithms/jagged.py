"""Jagged data, values [T] and row offsets [N + 1]: sums, means and extremes of the rows, and scans.

`Rows` says where the rows are and reduces over them, `Kept` drops the masked tokens and puts them
back, `discounted_sums` and `cumulative_sums` run along each row. N rows, T tokens.

A padded matrix is the jagged batch whose rows are all equally long (`Rows.padded`) with a mask, so
there is one code path and padding is one more kind of masked token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 32  # tokens summed by one matrix product; the loop runs over the blocks of the longest row
FEWEST_BLOCKS = 256  # in a matrix product


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Where the rows of a flat [T] tensor begin and end, and the row of each token.

    Three rows of 2, 0 and 1 tokens:

        rows = Rows.of_lengths(tensor([2, 0, 1]))
        rows.offsets                                # tensor([0, 2, 2, 3])
        rows.ids                                    # tensor([0, 0, 2])
        rows.sum(tensor([1.0, 2.0, 5.0]))           # tensor([3.0, 0.0, 5.0])
        rows.spread(tensor([7.0, 8.0, 9.0]))        # tensor([7.0, 7.0, 9.0])
    """

    offsets: Tensor  # int64 [N + 1]; row i is values[offsets[i]:offsets[i + 1]]
    ids: Tensor  # int64 [T]; row number of each token, ascending

    @classmethod
    def of_offsets(cls, offsets: Tensor) -> Rows:
        """Rows from offsets [N + 1]; offsets[0] is 0 and they do not decrease."""
        offsets = offsets.to(torch.int64)
        count = offsets.numel() - 1
        total = int(offsets[-1])
        # A cumulative sum of row starts is ten times faster than repeat_interleave.
        starts = torch.zeros(total + 1, dtype=torch.int64, device=offsets.device)
        if count > 1:
            starts.index_add_(0, offsets[1:-1], torch.ones_like(offsets[1:-1]))
        return cls(offsets=offsets, ids=starts[:total].cumsum(0))

    @classmethod
    def of_lengths(cls, lengths: Tensor) -> Rows:
        """Rows from lengths [N]."""
        lengths = lengths.to(torch.int64)
        return cls.of_offsets(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))

    @classmethod
    def padded(cls, count: int, width: int, device: torch.device | None = None) -> Rows:
        """The rows of a [count, width] matrix, flattened; the mask tells which cells are tokens."""
        offsets = torch.arange(count + 1, device=device) * width
        ids = torch.arange(count, device=device).repeat_interleave(width)
        return cls(offsets=offsets, ids=ids)

    @property
    def count(self) -> int:
        """Number of rows, N."""
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row, masked ones included [N]."""
        return self.offsets[1:] - self.offsets[:-1]

    def sum(self, values: Tensor) -> Tensor:
        """Sum of each row: [T] -> [N]; 0 for an empty row. Differentiable."""
        return _RowSum.apply(values, self.offsets, self.ids)

    def spread(self, per_row: Tensor) -> Tensor:
        """Each row's number at each of its tokens: [N] -> [T]. Differentiable."""
        return _Spread.apply(per_row, self.offsets, self.ids)

    def masked_sum(self, values: Tensor, mask: Tensor) -> Tensor:
        """Sum over the tokens with mask 1 [N]; what stands under mask 0 (NaN too) is ignored."""
        return self.sum(torch.where(mask, values, 0.0))

    def tokens(self, mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Number of tokens with mask 1 in each row [N]."""
        return self.sum(mask.to(dtype))

    def masked_mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Mean over the tokens with mask 1 [N]; 0 for a row without any."""
        return self.masked_sum(values, mask) / self.tokens(mask, values.dtype).clamp(min=1)

    def masked_max(self, values: Tensor, mask: Tensor, empty: float) -> Tensor:
        """Largest of values [T] under mask 1 in each row [N], `empty` without any. No gradient."""
        floor = torch.finfo(values.dtype).min
        filled = torch.where(mask, values.detach(), floor)
        largest = torch.segment_reduce(
            filled, "max", offsets=self.offsets, unsafe=True, initial=floor
        )
        return torch.where(self.tokens(mask) > 0, largest, empty)

    def masked_min(self, values: Tensor, mask: Tensor, empty: float) -> Tensor:
        """Smallest of values [T] under mask 1 in each row [N], `empty` without any. No gradient."""
        return -self.masked_max(-values, mask, -empty)

    def ends(self) -> tuple[Tensor, Tensor]:
        """Numbers of the rows with tokens, and the position of the last token of each."""
        filled = (self.lengths > 0).nonzero().squeeze(-1)
        return filled, self.offsets[filled + 1] - 1

    def within(self) -> Tensor:
        """Position of each token in its row, from 0 [T]."""
        return torch.arange(self.ids.numel(), device=self.ids.device) - self.offsets[self.ids]

    def kept(self, mask: Tensor) -> Kept:
        """The tokens with mask 1 as rows of their own, which may become empty."""
        if bool(mask.all()):
            return Kept(rows=self, index=None, total=mask.numel())
        index = mask.nonzero().squeeze(-1)
        lengths = self.tokens(mask).to(torch.int64)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        rows = Rows(offsets=offsets, ids=self.ids.index_select(0, index))
        return Kept(rows=rows, index=index, total=mask.numel())


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Some tokens of a batch, and their way there and back."""

    rows: Rows  # of the tokens kept
    index: Tensor | None  # int64 [kept]; their places among all; None: all are kept
    total: int  # T, all tokens

    def take(self, values: Tensor) -> Tensor:
        """[T] -> [kept]."""
        return values if self.index is None else values.index_select(0, self.index)

    def put(self, values: Tensor) -> Tensor:
        """[kept] -> [T], 0 elsewhere."""
        if self.index is None:
            return values
        return values.new_zeros(self.total).index_copy_(0, self.index, values)


class _RowSum(torch.autograd.Function):
    """Row sums; the gradient is a gather (segment_reduce's own backward is five times slower)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(offsets, ids)
        return torch.segment_reduce(values, "sum", offsets=offsets, unsafe=True, initial=0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        offsets, ids = ctx.saved_tensors
        return _Spread.apply(grad, offsets, ids), None, None


class _Spread(torch.autograd.Function):
    """The dual of _RowSum: deterministic on every device, unlike index_add."""

    @staticmethod
    def forward(ctx: Any, per_row: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(offsets, ids)
        return per_row[ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        offsets, ids = ctx.saved_tensors
        return _RowSum.apply(grad.contiguous(), offsets, ids), None, None


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, 0 where the denominator is 0, in value and in gradient."""
    safe = torch.where(denominator == 0, 1.0, denominator)
    return torch.where(denominator == 0, 0.0, numerator / safe)


def discounted_sums(values: Tensor, rows: Rows, decay: float) -> Tensor:
    """S_t = sum over j >= t of decay^(j - t) values_j within the row. No gradient.

    Args:
        values: [T].
        rows: N rows, T tokens.
        decay: per token, in [0, 1].

    Returns:
        [T].

    A row is cut into blocks. Within a block the sum is a product with a triangular matrix of powers;
    between blocks it is S = local + decay^(tokens left in the block) * S(next block).
    """
    if values.numel() == 0:
        return values.clone()
    cut = _Blocks.of(rows)
    local = _product(cut.gathered(values), _powers(values, decay))
    following = cut.carried(local[:, 0], decay**BLOCK, backwards=True)
    left = BLOCK - torch.arange(BLOCK, device=values.device)
    weight = torch.tensor(decay, dtype=values.dtype, device=values.device) ** left
    return cut.restored(local.addcmul_(following[:, None], weight))


def cumulative_sums(values: Tensor, rows: Rows) -> Tensor:
    """Sum of values [T] from the row's first token up to and with each token [T]. No gradient."""
    if values.numel() == 0:
        return values.clone()
    cut = _Blocks.of(rows)
    local = _product(cut.gathered(values), _powers(values, 1.0).t())
    before = cut.carried(local[:, -1], 1.0, backwards=False)
    return cut.restored(local.add_(before[:, None]))


class _Blocks:
    """The rows cut into blocks of BLOCK tokens, the last of each row filled up with zeros."""

    def __init__(self, rows: Rows, counts: Tensor) -> None:
        device = counts.device
        self.counts = counts  # [N] blocks of each row
        self.first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])  # [N + 1] its first block
        row = Rows.of_offsets(self.first).ids
        inside = torch.arange(row.numel(), device=device) - self.first[row]
        self.starts = rows.offsets[row] + inside * BLOCK  # [B] first token of each block
        self.sizes = (rows.offsets[row + 1] - self.starts).clamp(max=BLOCK)  # [B] its tokens
        self.filled = torch.arange(BLOCK, device=device) < self.sizes[:, None]  # bool [B, BLOCK]

    @classmethod
    def of(cls, rows: Rows) -> _Blocks:
        return cls(rows, (rows.lengths + BLOCK - 1) // BLOCK)

    def gathered(self, values: Tensor) -> Tensor:
        """[T] -> [B, BLOCK]; windows of contiguous tokens, so that one index serves a block."""
        windows = torch.nn.functional.pad(values, (0, BLOCK)).unfold(0, BLOCK, 1)
        blocks = windows[self.starts]
        short = (self.sizes < BLOCK).nonzero().squeeze(-1)
        blocks[short] = torch.where(self.filled[short], blocks[short], 0.0)
        return blocks

    def restored(self, blocks: Tensor) -> Tensor:
        """[B, BLOCK] -> [T]."""
        return torch.masked_select(blocks, self.filled)

    def carried(self, totals: Tensor, factor: float, *, backwards: bool) -> Tensor:
        """What reaches each block from those after it (or before it) in its row: [B] -> [B]."""
        reached = torch.zeros_like(totals)
        order = self.counts.argsort(descending=True)  # many blocks first: each turn is a prefix
        counts = self.counts[order]
        turns = int(counts[0])
        active = (counts[:, None] > torch.arange(turns, device=counts.device)).sum(0).tolist()
        running = totals.new_zeros(counts.numel())
        first = self.first[:-1][order]
        for turn in reversed(range(turns)) if backwards else range(turns):
            where = first[: active[turn]] + turn
            part = running[: active[turn]]
            reached[where] = part
            part.mul_(factor).add_(totals[where])
        return reached


def _product(blocks: Tensor, powers: Tensor) -> Tensor:
    """blocks [B, BLOCK] @ powers, each row's numbers the same to the bit whatever the other rows.

    For few rows BLAS takes other kernels, which round otherwise; so few rows are made up to many.
    """
    short = FEWEST_BLOCKS - len(blocks)
    if short <= 0:
        return blocks @ powers
    return (torch.nn.functional.pad(blocks, (0, 0, 0, short)) @ powers)[: len(blocks)]


def _powers(values: Tensor, decay: float) -> Tensor:
    """[BLOCK, BLOCK]: decay^(j - t) at row j, column t where j >= t, else 0."""
    index = torch.arange(BLOCK, device=values.device)
    distance = index[:, None] - index[None, :]
    powers = torch.tensor(decay, dtype=torch.float64, device=values.device) ** distance.clamp(min=0)
    return torch.where(distance >= 0, powers, 0.0).to(values.dtype)
