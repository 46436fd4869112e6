"""Snapshots of the trainer's state: folders of files, and the markers that make them count.

The engines write the files below `RunStore.state_key(step)` (engines/train/checkpoint.py); `mark`
then lists them in marker.json, the last file. A snapshot without a marker does not exist. `base_of`
says from which one the state of a version is rebuilt, which may be one of the parent run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

from storage.objects import documents
from storage.objects.digests import digest
from storage.objects.errors import ObjectDamaged, ObjectMissing, StoreError
from storage.runs.origins import origin_of, parent_of
from storage.runs.run_store import RunStore
from storage.runs.weights import WeightsRef

FORMAT = "refrain.snapshot/1"
MARKER = "marker.json"
STATE_FORMAT = "refrain.state/1"  # of the index of the tensors' pieces
INDEX = "index.json"


class StateFile(BaseModel):
    """One file of a snapshot."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    nbytes: int
    digest: str | None  # None where index.json has the digests


class Snapshot(BaseModel):
    """The marker of a snapshot: the trainer's state after `step`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    step: int
    key: str  # folder, relative to the store
    files: dict[str, StateFile]  # by path below the folder


def mark(run: RunStore, step: int) -> Snapshot:
    """List the files that were written and make the snapshot count. The first mark stands.

    Raises StoreError when there are no files.
    """
    key = run.state_key(step)
    files = {}
    for path in run.store.list(key):
        name = path.removeprefix(f"{key}/")
        if name != MARKER:
            files[name] = StateFile(nbytes=run.store.size(path), digest=None)
    if not files:
        raise StoreError(f"There is nothing below {run.store.url(key)} to mark as a snapshot.")
    snapshot = Snapshot(step=step, key=key, files=files)
    data = documents.encode(FORMAT, snapshot.model_dump(mode="json"))
    if run.store.create(f"{key}/{MARKER}", data):
        return snapshot
    return read(run, step)


def read(run: RunStore, step: int) -> Snapshot:
    """The marker of a snapshot. Raises ObjectMissing, ObjectDamaged."""
    key = f"{run.state_key(step)}/{MARKER}"
    return documents.validated(Snapshot, key, documents.read(run.store, key, FORMAT))


def snapshots(run: RunStore) -> list[int]:
    """Steps that have a marked snapshot, ascending."""
    return [n for n in run.state_steps() if run.store.exists(f"{run.state_key(n)}/{MARKER}")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The nearest point at or below a version from which the trainer's state can be rebuilt."""

    version: int  # in the run that asks
    run: str = ""  # whose snapshot it is
    step: int = 0  # of the snapshot, in that run
    weights: WeightsRef | None = None  # load these, with a fresh optimizer, instead of a snapshot


def base_of(run: RunStore, version: int) -> Base | None:
    """Where to begin for the state of a version; None: at the model's own weights, version 0.

    Raises ObjectMissing for a run that goes on with its parent's state while that is stored only
    as an older snapshot and batches: the parent's own settings must replay it first.
    """
    own = [step for step in snapshots(run) if step <= version]
    if own:
        return Base(version=own[-1], run=run.run, step=own[-1])
    origin = origin_of(run)
    if origin is None:
        return None
    if not origin.trainer_state:  # the weights are a policy's: a critic begins anew
        critic = run.role == "critic"
        return None if critic else Base(version=origin.at, weights=origin.weights)
    found = base_of(parent_of(run, origin), origin.step)
    if found is None or found.version != origin.step:
        raise ObjectMissing(f"There is no snapshot of {origin}, at which run {run.run} begins.")
    return Base(version=origin.at, run=found.run, step=found.step)


def has_base(run: RunStore, version: int) -> bool:
    """Whether the state of a version can be rebuilt under the run's own settings."""
    try:
        base_of(run, version)
    except ObjectMissing:
        return False
    return True


def check_pieces(run: RunStore, folder: str) -> None:
    """Read every piece of every tensor that a snapshot's index lists, and compare its digest.

    Raises ObjectMissing, and ObjectDamaged naming the tensor.
    """
    body = cast("dict[str, Any]", documents.read(run.store, f"{folder}/{INDEX}", STATE_FORMAT))
    for name, tensor in body["tensors"].items():
        for piece in tensor["chunks"]:
            key, (start, stop) = f"{folder}/{piece['file']}", piece["bytes"]
            if digest(run.store.read_ranges([(key, start, stop)])[0]) != piece["digest"]:
                raise ObjectDamaged(
                    f"Object {key} is damaged: the digest of tensor {name!r} does not match."
                )
