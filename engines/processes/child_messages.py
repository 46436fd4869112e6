"""What a process of a user's code and its owner send each other, as plain values.

Messages go as pickles over a socket pair. A message that is packed holds plain values only: to read
it imports nothing, so a user's file may have modules of any name, `engines` too. Only the standard
library is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, TypeAlias

Packed: TypeAlias = "tuple[str, dict[str, Any]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """The answer to a first message where the user's code cannot be loaded: the user's mistake."""

    error: str  # one sentence for the user


def by_name(*kinds: type) -> Mapping[str, type]:
    """The classes of a protocol's messages, for `unpacked`."""
    return {kind.__name__: kind for kind in kinds}


def packed(message: Any) -> Packed:
    """A message, which is a dataclass, as plain values: the name of its class, and its fields."""
    return type(message).__name__, {
        field.name: attrgetter(field.name)(message) for field in fields(message)
    }


def unpacked(message: Packed, kinds: Mapping[str, type]) -> Any:
    """The message that `packed` took apart, of one of these classes."""
    kind, values = message
    return kinds[kind](**values)
