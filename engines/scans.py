"""Running sums within rows, for returns, GAE and paths, without a loop over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.jagged import Rows

BLOCK = 32  # tokens summed by one matrix product; the loop runs over the blocks of the longest row


def discounted_sums(values: Tensor, rows: Rows, decay: float) -> Tensor:
    """S_t = sum over j >= t of decay^(j - t) values_j within the row: [T] -> [T]. No gradient.

    A row is cut into blocks. Within a block the sum is a product with a triangular matrix of powers;
    between blocks it is S = local + decay^(tokens left in the block) * S(next block).
    """
    if values.numel() == 0:
        return values.clone()
    cut = _Blocks.of(rows)
    local = cut.gathered(values) @ _powers(values, decay)
    following = cut.carried(local[:, 0], decay**BLOCK, backwards=True)
    left = BLOCK - torch.arange(BLOCK, device=values.device)
    weight = torch.tensor(decay, dtype=values.dtype, device=values.device) ** left
    return cut.restored(local.addcmul_(following[:, None], weight))


def cumulative_sums(values: Tensor, rows: Rows) -> Tensor:
    """Sum from the row's first token up to and with each token: [T] -> [T]. No gradient."""
    if values.numel() == 0:
        return values.clone()
    cut = _Blocks.of(rows)
    local = cut.gathered(values) @ _powers(values, 1.0).t()
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


def _powers(values: Tensor, decay: float) -> Tensor:
    """[BLOCK, BLOCK]: decay^(j - t) at row j, column t where j >= t, else 0."""
    index = torch.arange(BLOCK, device=values.device)
    distance = index[:, None] - index[None, :]
    powers = torch.tensor(decay, dtype=torch.float64, device=values.device) ** distance.clamp(min=0)
    return torch.where(distance >= 0, powers, 0.0).to(values.dtype)
