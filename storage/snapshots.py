"""Which trainer snapshots a run has. A snapshot counts once its marker is there, written last."""

from __future__ import annotations

from storage import documents
from storage.runs import RunStore

FORMAT = "refrain.snapshot/1"


def snapshots(files: RunStore) -> list[int]:
    """Steps after which a whole snapshot was stored, ascending."""
    keys = files.store.list(f"{files.run}/state/")
    return sorted(int(key.split("/")[-2]) for key in keys if key.endswith("/marker.json"))


def mark_snapshot(files: RunStore, step: int, record: dict[str, object]) -> None:
    """Make a snapshot count, after all its data are written."""
    key = f"{files.state_key(step)}/marker.json"
    files.store.write(key, documents.encode(FORMAT, record))
