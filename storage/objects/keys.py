"""Keys of objects: clean relative paths, whoever wrote them down.

What a store says of itself (a manifest's files, the sources of a batch) names other objects. None of
it may lead out of the store's folder, whatever it says.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def clean_key(key: str, folder: bool = False) -> str:
    """`key` if it is a clean relative path; an empty one only where a folder is meant.

    Raises ValueError.
    """
    if folder and not key:
        return key
    parts = key.split("/")
    if not all(parts) or ".." in parts or "." in parts or "\\" in key or "\0" in key:
        raise ValueError(
            f"Key {key!r:.200} is no relative POSIX path; use names joined by single slashes."
        )
    return key


def _stored(key: str) -> str:
    try:
        return clean_key(key)
    except ValueError:
        raise ValueError(f"{key!r:.200} leads out of the store, or is no clean path") from None


StoredKey = Annotated[str, AfterValidator(_stored)]  # a field of a record that is read from a store
