"""AdamW's moments in eight bits each: codes in blocks, each with its largest magnitude.

"8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861), whose dynamic code has some seven
decades below a block's largest. Blocks are parts of rows, so that they are the same on any number of
ranks, which share a parameter by rows.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

DECADES = 7


@cache
def code(signed: bool, device: torch.device) -> Tensor:
    """The 256 numbers that a code can mean, ascending, float32 [256]: the paper's dynamic code.

    0, 1, and in the decade (10^(e-1), 10^e], for e from -6 to 0, the middles of 2^(e+6) equal parts;
    of both signs, or of twice as many parts.
    """
    levels = [torch.tensor([0.0, 1.0])]
    for decade in range(DECADES):
        parts = 2 ** (decade if signed else decade + 1)
        edges = torch.linspace(0.1, 1, parts + 1)
        middles = 10.0 ** (decade - DECADES + 1) * (edges[:-1] + edges[1:]) / 2
        levels += [middles, -middles] if signed else [middles]
    return torch.cat(levels).sort().values.to(device)


@cache
def _lowest(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """By the upper half of a share's bits [65536] the lowest nearest code of such shares, int32.

    And [256] where a code ends, midway to the next. No two ends have the same upper half, so that one
    comparison gives the nearest code: a search among them takes ten times as long.
    """
    levels = code(signed, torch.device("cpu"))
    ends = torch.cat([(levels[1:] + levels[:-1]) / 2, torch.tensor([float("inf")])])
    halves = torch.arange(1 << 16, dtype=torch.int32)
    # Of numbers below 0 the smallest has all the lower bits.
    bits = (halves << 16) | torch.where(halves < 1 << 15, 0, 0xFFFF).to(torch.int32)
    shares = bits.view(torch.float32).nan_to_num(0.0)
    lowest = torch.searchsorted(ends[:-1], shares, out_int32=True)
    return lowest.to(device), ends.to(device)


def encode(values: Tensor, codes: Tensor, largest: Tensor, signed: bool) -> None:
    """Write the code of each value that is nearest to it, as a share of its block's largest.

    A second moment (not signed) that is not 0 never becomes 0: a step divides by its root.

    Args:
        values: float32 [n], finite.
        codes: uint8 [n], written.
        largest: float32 [blocks], of blocks of n / blocks values; written.
        signed: Whether values may be negative.
    """
    if not len(largest):
        return
    blocks = values.view(len(largest), -1)
    torch.amax(blocks.abs(), dim=1, out=largest)
    shares = blocks / largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    lowest, ends = _lowest(signed, values.device)
    halves = (shares.view(torch.int32) >> 16).bitwise_and_(0xFFFF).view(-1)
    nearest = lowest.index_select(0, halves)
    nearest += shares.view(-1) > ends.index_select(0, nearest)
    if not signed:
        nearest.clamp_(min=(values > 0).to(torch.int32))
    codes.copy_(nearest)


def decode(codes: Tensor, largest: Tensor, signed: bool) -> Tensor:
    """The values, float32 [n], of codes, uint8 [n], in blocks whose largest are float32 [blocks]."""
    if not len(largest):
        return torch.zeros_like(codes, dtype=torch.float32)
    shares = code(signed, codes.device).index_select(0, codes.to(torch.int32))
    return shares.view(len(largest), -1).mul_(largest[:, None]).view(-1)
