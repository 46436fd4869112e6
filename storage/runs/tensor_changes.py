"""The difference of a tensor from another one of its type and shape, exact to the bit.

It is made of blocks of elements: how many differ, the sizes of what follows, then two pieces packed
by zstd, each byte of a number in a plane of its own: the gaps between the elements that differ, and
their XOR. What a step of training changes in bfloat16 lies far apart and in the lowest bits, so both
pack well.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from storage.objects.errors import ObjectDamaged

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK = 4 * 2**20  # elements whose difference is made at once
HEAD = struct.Struct(
    "<QQQQ"
)  # elements that differ, bytes of a gap, bytes of the two packed pieces
LEVEL = 1  # of zstd: higher ones take longer and gain a percent


def encode(new: np.ndarray, old: np.ndarray, itemsize: int) -> list[bytes]:
    """The pieces of the difference, to be joined; none where there is no difference.

    Args:
        new: [bytes] uint8, of elements of `itemsize` bytes.
        old: The same of the other tensor.
    """
    new_elements, old_elements = (part.view(f"<u{itemsize}") for part in (new, old))
    pieces, differ = [], False
    for first in range(0, len(new_elements), BLOCK):
        xor = new_elements[first : first + BLOCK] ^ old_elements[first : first + BLOCK]
        at = np.flatnonzero(xor != 0)
        gaps = np.diff(at, prepend=-1)
        gaps = gaps.astype("<u2" if gaps.max(initial=0) < 2**16 else "<u4")
        packed = _pack(gaps), _pack(xor[at])
        pieces += [HEAD.pack(len(at), gaps.itemsize, *map(len, packed)), *packed]
        differ = differ or len(at) > 0
    return pieces if differ else []


def decode(data: memoryview, old: np.ndarray, itemsize: int) -> np.ndarray:
    """The bytes [bytes] uint8 of the tensor that differs by `data` from `old`, which stays as it is.

    Raises ObjectDamaged where `data` is no difference from such a tensor.
    """
    new = np.array(old)
    elements = new.view(f"<u{itemsize}")
    first = 0
    for gaps, xor in _blocks(data, itemsize):
        at = np.cumsum(gaps, dtype=np.int64)
        at += first - 1
        if len(at) and at[-1] >= len(elements):
            raise ObjectDamaged("the difference reaches past the tensor's end")
        elements[at] ^= xor
        first += BLOCK
    return new


def _blocks(data: memoryview, itemsize: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Gaps and XOR of the elements that differ, block by block."""
    place = 0
    while place < data.nbytes:
        try:
            count, width, *sizes = HEAD.unpack_from(data, place)
            place += HEAD.size
            if count > BLOCK or width not in (2, 4):  # before any memory is taken for them
                raise ValueError(f"a block has {count} elements, with gaps of {width} bytes")
            parts = []
            for size, each in zip(sizes, (width, itemsize), strict=True):
                parts.append(_unpack(data[place : place + size], count, each))
                place += size
        except (struct.error, OSError, ValueError, TypeError, OverflowError) as error:
            raise ObjectDamaged(f"it is no difference of tensors: {error}") from error
        yield parts[0], parts[1]


def _pack(numbers: np.ndarray) -> bytes:
    planes = np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, numbers.itemsize).T)
    return bytes(_zstd().compress(planes, asbytes=True))


def _unpack(packed: memoryview, count: int, itemsize: int) -> np.ndarray:
    planes = np.frombuffer(_zstd().decompress(packed, count * itemsize), np.uint8)
    numbers = np.ascontiguousarray(planes.reshape(itemsize, count).T)
    return numbers.reshape(-1).view(f"<u{itemsize}")


@cache
def _zstd() -> pa.Codec:
    import pyarrow as pa  # 0.1 s, in processes that otherwise never need it

    return pa.Codec("zstd", compression_level=LEVEL)
