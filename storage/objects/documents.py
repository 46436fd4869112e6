"""JSON as a store has it: documents with a format name and a digest, keys, values of rows.

Documents are markers, manifests, commits, run.json. Values of rows are what a row of data may hold,
and Python structures that are kept exactly in text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from storage.objects.errors import ObjectDamaged, ObjectMissing

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from storage.objects.store import Store

PREFIX = "xxh3:"

JsonValue: TypeAlias = "None | bool | int | float | str | list[JsonValue] | dict[str, JsonValue]"
Row: TypeAlias = "Mapping[str, JsonValue]"  # column -> value; never changed in place

Model = TypeVar("Model", bound=BaseModel)
Reader = Callable[[dict[str, object]], dict[str, object]]


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
                for pair in cast("list[list[JsonValue]]", pairs)
            }
    return {key: _untagged(item) for key, item in value.items()}


def encode(form: str, body: Mapping[str, object], indent: int | None = 1) -> bytes:
    """The document's bytes. Raises ValueError for NaN or infinity, TypeError for no JSON.

    indent: spaces before each level, a value to a line; None puts all on one, for long lists.
    """
    document = {"format": form, "digest": digest(canonical(body)), "body": body}
    return json.dumps(document, indent=indent, allow_nan=False).encode() + b"\n"


def decode(form: str, key: str, data: bytes) -> dict[str, object]:
    """The body of the document `key`. Raises ObjectDamaged when it is not what was written."""
    return decode_version({form: dict}, key, data)


def decode_version(readers: Mapping[str, Reader], key: str, data: bytes) -> dict[str, object]:
    """The body of a document of any of several formats, as the newest has it.

    readers: format -> what makes a body of the newest format of one of that format; newest first.
    """
    form = next(iter(readers))
    try:
        document = json.loads(data)
        version, body = document["format"], document["body"]
        matches = isinstance(body, dict) and digest(canonical(body)) == document["digest"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ObjectDamaged(f"Object {key} is damaged: it is no {form} document.") from error
    if not isinstance(version, str) or version not in readers:
        raise ObjectDamaged(f"Object {key} is a {str(version)[:80]} document, not {form}.")
    if not matches:
        raise ObjectDamaged(f"Object {key} is damaged: its digest does not match its content.")
    try:
        return readers[version](body)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        fault = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        raise ObjectDamaged(f"Object {key} is no valid {version} document: {fault}.") from error


def validated(model: type[Model], key: str, body: Mapping[str, object]) -> Model:
    """The document's body as a model. Raises ObjectDamaged, in one sentence, when it is none."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = " ".join(first["msg"].removeprefix("Value error, ").split())
        fault = f"{where}: {reason}" if where else reason
        name = model.__name__.lower()
        raise ObjectDamaged(f"Object {key} is no valid {name}: {fault}.") from error


def read(store: Store, key: str, form: str) -> dict[str, object]:
    """Raises ObjectMissing, ObjectDamaged."""
    return decode(form, key, store.read(key))


class StoredRecord(BaseModel):
    """A frozen record that is read back from a store; fields of later versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


def read_record(model: type[Model], store: Store, key: str, form: str) -> Model | None:
    """The record under a key; None where there is none. Raises ObjectDamaged."""
    try:
        return validated(model, key, read(store, key, form))
    except ObjectMissing:
        return None


def write_record(
    store: Store, key: str, form: str, record: BaseModel, indent: int | None = 1
) -> None:
    """Put a record in place of an earlier one. indent: as `encode`."""
    store.write(key, encode(form, record.model_dump(mode="json"), indent))
