"""The lists of a commit that grow with its step, in an object of their own where they are long.

A step of thousands of samples has hundreds of shards, and so refs and attempts of hundreds of
entries. commit.json then names `lists-<digest>.json` beside it, by key and digest, so that who needs
one number of a step reads one small object, and the chain of commits vouches for the lists all the
same. They are written before the commit that names them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pydantic import BaseModel, ConfigDict

from storage.objects import documents
from storage.objects.backends import StoredKey
from storage.objects.documents import PREFIX, digest
from storage.objects.errors import ObjectDamaged

if TYPE_CHECKING:
    from collections.abc import Mapping

    from storage.runs.run_store import RunStore

FORMAT = "refrain.commit-lists/1"
FIELDS = ("refs", "carried", "dropped_rows", "attempts")  # of a commit
INLINE_BYTES = 64 * 2**10  # lists of so many bytes stay in commit.json, which is one read less


class ListsRef(BaseModel):
    """Where the lists of a commit are."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    key: StoredKey  # relative to the store
    digest: str  # of the object's bytes
    nbytes: int


def detach(run: RunStore, step: int, body: Mapping[str, object]) -> dict[str, object]:
    """The body of a commit as commit.json has it; long lists are stored beside it."""
    lists = {name: body[name] for name in FIELDS}
    data = documents.encode(FORMAT, lists, indent=None)
    if len(data) <= INLINE_BYTES:
        return dict(body)
    found = digest(data)
    ref = ListsRef(
        key=run.lists_key(step, found.removeprefix(PREFIX)), digest=found, nbytes=len(data)
    )
    run.store.create(ref.key, data)  # an object of that name has these bytes
    short = {name: value for name, value in body.items() if name not in FIELDS}
    return {**short, "lists": ref.model_dump()}


def attach(run: RunStore, key: str, body: Mapping[str, object]) -> dict[str, object]:
    """The body of the commit `key`, with its lists. Raises ObjectMissing, ObjectDamaged."""
    if body.get("lists") is None:
        return dict(body)
    ref = documents.validated(ListsRef, key, cast("Mapping[str, object]", body["lists"]))
    data = run.store.read(ref.key)
    if digest(data) != ref.digest:
        raise ObjectDamaged(
            f"Object {ref.key} is damaged: its digest is {digest(data)}, {key} says {ref.digest}."
        )
    lists = documents.decode(FORMAT, ref.key, data)
    return {**body, **{name: lists[name] for name in FIELDS if name in lists}}
