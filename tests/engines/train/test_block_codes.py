"""Moments in eight bits: the paper's code, each value's nearest, and the bound of the error.

Beside torchao 0.18.0 and bitsandbytes 0.50.2 the numbers were equal, and torchao's codes too, but for
second moments that it makes 0.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engines.train.optimizer import code, decode, encode
from engines.train.optimizer_pieces import block_of

CPU = torch.device("cpu")


def coded(values: Tensor, blocks: int, signed: bool) -> tuple[Tensor, Tensor]:
    codes, largest = torch.zeros(len(values), dtype=torch.uint8), torch.zeros(blocks)
    encode(values, codes, largest, signed)
    return codes, largest


def drawn(signed: bool) -> Tensor:
    """16 blocks of 64 over many decades, of which the last is 0."""
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(1024, generator=draw) * 10 ** (8 * torch.rand(1024, generator=draw) - 12)
    values[-64:] = 0
    return values if signed else values.abs()


def test_the_code_is_the_papers() -> None:
    signed, unsigned = code(True, CPU).tolist(), code(False, CPU).tolist()
    assert len(set(signed)) == len(set(unsigned)) == 256
    assert signed[127] == unsigned[0] == 0
    assert signed[128:130] == pytest.approx([5.5e-7, 3.25e-6])  # 1 and 2 parts of a decade
    assert unsigned[1:4] == pytest.approx([3.25e-7, 7.75e-7, 2.125e-6])
    assert signed[-1] == unsigned[-1] == 1
    assert signed[0] == pytest.approx(-(1 - 0.9 / 128))
    assert signed[:127] == [-value for value in reversed(signed[128:255])]


@pytest.mark.parametrize("signed", [True, False])
def test_each_value_gets_its_nearest_code(signed: bool) -> None:
    values = drawn(signed)
    codes, largest = coded(values, 16, signed)
    known = code(signed, CPU).double()
    shares = values.view(16, 64) / largest.clamp(min=1e-38)[:, None]
    distances = (shares.view(-1, 1).double() - known).abs()
    mine = distances.gather(1, codes.long()[:, None]).view(-1)
    away = values == 0 if not signed else torch.ones_like(values, dtype=torch.bool)
    raised = (codes == 1) & ~away & (distances.argmin(1) == 0)
    assert torch.equal(largest, values.view(16, 64).abs().amax(1))
    assert bool((mine[~raised] <= distances.min(1).values[~raised] + 1e-9).all())
    assert signed or bool(raised.any())
    assert not decode(codes, largest, signed)[-64:].any()


@pytest.mark.parametrize("signed", [True, False])
def test_a_code_ends_where_a_search_says(signed: bool) -> None:
    """At every end, at its neighbours, and at both ends of each upper half of bits."""
    known = code(signed, CPU)
    ends = (known[1:] + known[:-1]) / 2
    halves = torch.arange(0x3F80) << 16
    edges = torch.cat([halves, halves | 0xFFFF]).to(torch.int32).view(torch.float32)
    up, down = (torch.nextafter(ends, torch.tensor(side)) for side in (9.0, -9.0))
    shares = torch.cat([ends, up, down, edges, torch.tensor([1.0])])
    shares = torch.cat([shares, -shares[:-1]]) if signed else shares
    shares = torch.cat([shares, torch.ones(-len(shares) % 64)])
    # One block, so that each is a share of 1.
    codes, _ = coded(shares, 1, signed)
    wanted = torch.searchsorted(ends, shares).to(torch.uint8)
    if not signed:
        wanted.clamp_(min=(shares > 0).to(torch.uint8))
    assert torch.equal(codes, wanted)


@pytest.mark.parametrize("signed", [True, False])
def test_the_error_is_within_the_codes_width(signed: bool) -> None:
    """Half a part of a value's decade, relative to the block's largest."""
    values = drawn(signed)
    codes, largest = coded(values, 16, signed)
    error = (decode(codes, largest, signed) - values).view(16, 64).abs().amax(1)
    widest = 0.9 / (64 if signed else 128)
    assert bool((error <= largest * widest * 0.501).all())


def test_a_second_moment_is_never_lost() -> None:
    values = torch.tensor([1.0, 1e-30, 0.0, 1e-7] * 16)
    codes, largest = coded(values, 1, False)
    back = decode(codes, largest, False)
    assert torch.equal(back > 0, values > 0)
    assert back[1] == pytest.approx(3.25e-7)


def test_codes_of_what_was_decoded_are_the_same() -> None:
    for signed in (True, False):
        codes, largest = coded(drawn(signed), 16, signed)
        again, same = coded(decode(codes, largest, signed), 16, signed)
        assert torch.equal(codes, again)
        assert signed or torch.equal(largest, same)  # -1 is no code


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((4864, 896), 128),
        ((896, 4864), 256),
        ((128, 64), 64),
        ((8, 16, 96), 256),  # experts in one stack: 1,536 of a row
        ((4096,), 0),  # a norm
        ((64, 63), 0),
        ((4096, 16), 0),  # an adapter's factor
        ((32, 64), 0),  # too few
    ],
)
def test_blocks_are_of_rows(shape: tuple[int, ...], block: int) -> None:
    assert block_of(shape) == block
    assert not block or not math.prod(shape[1:]) % block
