"""Small JSON objects with a format name and a digest: markers, manifests, commits, run.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from storage.digests import canonical, digest
from storage.errors import ObjectDamaged

if TYPE_CHECKING:
    from storage.store import Store


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


def read(store: Store, key: str, form: str) -> dict[str, object]:
    """Raises ObjectMissing, ObjectDamaged."""
    return decode(form, key, store.read(key))
