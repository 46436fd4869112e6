"""How an optimizer step cuts parameters and their state; without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

PIECE = 2**25  # elements of a parameter that AdamW takes at a time (optimizer.py)
SLOTS = 3  # pieces on the device where its state is on the host: one comes, one is used, one goes
BLOCK, SHORTEST = 256, 32  # of a row's moments in eight bits: numbers in a block, most and fewest
FEWEST = 4096  # elements of a parameter whose moments may be so
# Bytes of an element of a piece while its moments are taken from eight bits and put back, with its
# master taken from a remainder; and for the latter alone.
CODED, JOINED = 26, 13


def parts_of(length: int) -> Iterator[tuple[int, int]]:
    """Where the pieces of so many elements begin and end; one at least."""
    for start in range(0, max(length, 1), PIECE):
        yield start, min(start + PIECE, length)


def block_of(shape: Sequence[int]) -> int:
    """How many moments of a parameter in eight bits share a largest; 0: its moments are float32.

    A power of two that divides its rows, of which a matrix has one for each index of its first
    dimension.
    """
    block = math.gcd(math.prod(shape[1:]), BLOCK)
    large = len(shape) > 1 and math.prod(shape) >= FEWEST
    return block if large and block >= SHORTEST else 0
