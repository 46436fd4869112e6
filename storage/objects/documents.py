"""Small JSON objects with a format name and a digest: markers, manifests, commits, run.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from storage.objects.digests import canonical, digest
from storage.objects.errors import ObjectDamaged

if TYPE_CHECKING:
    from storage.objects.store import Store

Model = TypeVar("Model", bound=BaseModel)
Reader = Callable[[dict[str, object]], dict[str, object]]


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
        found, said, body = document["format"], document["digest"], document["body"]
        matches = isinstance(body, dict) and digest(canonical(body)) == said
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ObjectDamaged(f"Object {key} is damaged: it is no {form} document.") from error
    if not isinstance(found, str) or found not in readers:
        raise ObjectDamaged(f"Object {key} is a {str(found)[:80]} document, not {form}.")
    if not matches:
        raise ObjectDamaged(f"Object {key} is damaged: its digest does not match its content.")
    try:
        return readers[found](body)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        raise ObjectDamaged(f"Object {key} is no valid {found} document: {said}.") from error


def validated(model: type[Model], key: str, body: Mapping[str, object]) -> Model:
    """The document's body as a model. Raises ObjectDamaged, in one sentence, when it is none."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = " ".join(first["msg"].removeprefix("Value error, ").split())
        said = f"{where}: {reason}" if where else reason
        name = model.__name__.lower()
        raise ObjectDamaged(f"Object {key} is no valid {name}: {said}.") from error


def read(store: Store, key: str, form: str) -> dict[str, object]:
    """Raises ObjectMissing, ObjectDamaged."""
    return decode(form, key, store.read(key))
