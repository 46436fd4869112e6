"""Discounted sums over what follows in a row, for returns and GAE, without a loop over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.jagged import Rows

BLOCK = 64  # tokens summed by one matrix product; the loop runs over the blocks of the longest row


def discounted_sums(values: Tensor, rows: Rows, decay: float) -> Tensor:
    """S_t = sum over j >= t of decay^(j - t) values_j within the row: [T] -> [T]. No gradient.

    A row is cut into blocks. Within a block the sum is a product with a triangular matrix of powers;
    between blocks it is S = local + decay^(tokens left in the block) * S(next block).
    """
    if values.numel() == 0:
        return values.clone()
    blocks = (rows.lengths + BLOCK - 1) // BLOCK  # per row
    first = torch.cat([blocks.new_zeros(1), blocks.cumsum(0)])
    cell = (first[:-1] * BLOCK - rows.offsets[:-1])[rows.ids]
    cell += torch.arange(values.numel(), device=values.device)
    local = values.new_zeros(int(first[-1]) * BLOCK)
    local[cell] = values
    local = local.view(-1, BLOCK) @ _powers(values, decay)
    following = _block_carries(local[:, 0], blocks, first, decay)
    left = BLOCK - torch.arange(BLOCK, device=values.device)
    weight = torch.tensor(decay, dtype=values.dtype, device=values.device) ** left
    return torch.addcmul(local, following[:, None], weight).view(-1)[cell]


def _powers(values: Tensor, decay: float) -> Tensor:
    """[BLOCK, BLOCK]: decay^(j - t) at row j, column t where j >= t, else 0."""
    index = torch.arange(BLOCK, device=values.device)
    distance = index[:, None] - index[None, :]
    powers = torch.tensor(decay, dtype=torch.float64, device=values.device) ** distance.clamp(min=0)
    return torch.where(distance >= 0, powers, 0.0).to(values.dtype)


def _block_carries(totals: Tensor, blocks: Tensor, first: Tensor, decay: float) -> Tensor:
    """Sum that follows each block within its row, seen from its end: [B] totals -> [B]."""
    following = torch.zeros_like(totals)
    order = blocks.argsort(descending=True)  # rows with many blocks first: each turn is a prefix
    counts = blocks[order].cpu()
    running = totals.new_zeros(blocks.numel())
    for turn in range(int(counts[0]) - 1, -1, -1):
        active = order[: int((counts > turn).sum())]
        where = first[active] + turn
        following[where] = running[active]
        running[active] = totals[where] + decay**BLOCK * running[active]
    return following
