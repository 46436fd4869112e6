"""Small JSON objects with a format name and a digest: markers, manifests, commits, run.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from storage.digests import canonical, digest
from storage.errors import ObjectDamaged

if TYPE_CHECKING:
    from storage.store import Store

Model = TypeVar("Model", bound=BaseModel)


def encode(form: str, body: Mapping[str, object]) -> bytes:
    """The document's bytes. Raises ValueError for NaN or infinity, TypeError for no JSON."""
    document = {"format": form, "digest": digest(canonical(body)), "body": body}
    return json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"


def decode(form: str, key: str, data: bytes) -> dict[str, object]:
    """The body of the document `key`. Raises ObjectDamaged when it is not what was written."""
    try:
        document = json.loads(data)
        found, said, body = document["format"], document["digest"], document["body"]
    except (ValueError, KeyError, TypeError) as error:
        raise ObjectDamaged(f"Object {key} is damaged: it is no {form} document.") from error
    if found != form:
        raise ObjectDamaged(f"Object {key} is a {found} document, not {form}.")
    if not isinstance(body, dict) or digest(canonical(body)) != said:
        raise ObjectDamaged(f"Object {key} is damaged: its digest does not match its content.")
    return body


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
