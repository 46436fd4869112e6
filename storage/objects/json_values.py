"""Values of data rows as JSON: what a row may hold, and Python structures kept exactly in text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, TypeAlias, cast

import numpy as np

JsonValue: TypeAlias = "None | bool | int | float | str | list[JsonValue] | dict[str, JsonValue]"
Row: TypeAlias = "Mapping[str, JsonValue]"  # column -> value; never changed in place


def plain(value: object) -> JsonValue:
    """`value` with dates and decimals as text; TypeError for what has no JSON form, such as bytes."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form")


def pack(value: object) -> str:
    """JSON text from which `unpack` restores tuples, sets and keys that are no strings.

    Plain JSON turns these into lists and strings, and some of reasoning-gym's scorers then judge
    the same answer differently.
    """
    return json.dumps(_tagged(value), ensure_ascii=False)


def unpack(text: str) -> Any:
    """The value that `pack` wrote."""
    return _untagged(json.loads(text))


def _tagged(value: object) -> JsonValue:
    if isinstance(value, np.generic):
        return _tagged(value.item())
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [_tagged(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {"$set": sorted((_tagged(item) for item in value), key=repr)}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _tagged(item) for key, item in value.items()}
        return {"$dict": [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form")


def _untagged(value: JsonValue) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tuple": list(items)}:
            return tuple(_untagged(item) for item in items)
        case {"$set": list(items)}:
            return {_untagged(item) for item in items}
        case {"$dict": list(pairs)}:
            return {
                _untagged(pair[0]): _untagged(pair[1])
                for pair in cast(list[list[JsonValue]], pairs)
            }
    return {key: _untagged(item) for key, item in value.items()}
