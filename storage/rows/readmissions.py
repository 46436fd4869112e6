"""Requests to let rows in quarantine be drawn again, which a command leaves beside a run.

`<run>/readmissions/000001.json` and so on, never changed afterwards. The next draw takes account of
those that are there, and its commit says up to which number it did; so a draw that is made again
after a kill sees at least the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from pydantic import Field

from storage.objects import documents
from storage.objects.documents import StoredRecord
from storage.runs.run_store import RunStore

FORMAT = "refrain.readmission/1"


class Readmission(StoredRecord):
    """One request."""

    rows: list[int] | None  # of the data; None: all that are in quarantine
    by: str  # who asked
    asked_at: float = Field(default_factory=time.time)  # seconds since 1970


def ask(run: RunStore, request: Readmission) -> int:
    """Leave a request; its number, counted from 1."""
    data = documents.encode(FORMAT, request.model_dump(mode="json"))
    number = asked(run) + 1
    while not run.store.create(_key(run, number), data):  # another command was faster
        number += 1
    return number


def asked(run: RunStore) -> int:
    """How many requests there are."""
    return len(run.store.children(_folder(run)))


def between(run: RunStore, after: int, last: int) -> set[int] | None:
    """The rows that the requests after one number and up to another name; None: all rows."""
    rows: set[int] = set()
    for number in range(after + 1, last + 1):
        key = _key(run, number)
        request = documents.validated(Readmission, key, documents.read(run.store, key, FORMAT))
        if request.rows is None:
            return None
        rows.update(request.rows)
    return rows


def listed(run: RunStore) -> Sequence[Readmission]:
    """All requests, the oldest first."""
    keys = [_key(run, number) for number in range(1, asked(run) + 1)]
    return [
        documents.validated(Readmission, key, documents.read(run.store, key, FORMAT))
        for key in keys
    ]


def _folder(run: RunStore) -> str:
    return f"{run.run}/readmissions"


def _key(run: RunStore, number: int) -> str:
    return f"{_folder(run)}/{number:06d}.json"
