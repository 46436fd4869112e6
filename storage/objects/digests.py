"""Digests of bytes, and short keys made from the inputs of a stage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

PREFIX = "xxh3:"


def digest(data: Buffer) -> str:
    """`xxh3:` and the 128-bit xxh3 hash of `data` in hex. Finds damage; it is no signature."""
    return PREFIX + xxhash.xxh3_128_hexdigest(data)


class Digester:
    """The digest of bytes that arrive in pieces: the same as `digest` of them joined."""

    __slots__ = ("_hash",)

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, data: Buffer) -> None:
        self._hash.update(data)

    def digest(self) -> str:
        return PREFIX + self._hash.hexdigest()


def canonical(value: object) -> bytes:
    """JSON of `value` that is equal for equal values: sorted keys, no spaces, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()


def canonical_row(row: object) -> bytes:
    """As `canonical`, of a row of the data, which may hold NaN and infinity.

    They are written as Python and JavaScript do (NaN, Infinity, -Infinity), without quotes: as no
    text and no other number is. All NaN are one.
    """
    return json.dumps(row, sort_keys=True, separators=(",", ":")).encode()


def key_of(*parts: object) -> str:
    """16 hex digits (sha256) that name the JSON-able `parts`: equal parts, equal key.

    Raises TypeError when a part is no JSON.
    """
    return hashlib.sha256(canonical(parts)).hexdigest()[:16]


def digest_lines(entries: Iterable[object]) -> str:
    """The digest of JSON-able entries in the order given."""
    total = Digester()
    for entry in entries:
        total.update(canonical(entry))
        total.update(b"\n")
    return total.digest()
