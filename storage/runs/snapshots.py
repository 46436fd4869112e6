"""Snapshots of the trainer's state: folders of files, and the markers that make them count.

The engines write the files below `RunStore.state_key(step)` (engines/train/checkpoint.py); `mark`
then lists them in marker.json, the last file. A snapshot without a marker does not exist. `base_of`
says from which one the state of a version is rebuilt, which may be one of the parent run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from storage.batches.format import DTYPES
from storage.objects import documents
from storage.objects.backends import StoredKey
from storage.objects.documents import StoredRecord, digest
from storage.objects.errors import ObjectDamaged, ObjectMissing, StoreError
from storage.runs.run_store import RunStore, origin_of, parent_of
from storage.runs.weights import WeightsRef

if TYPE_CHECKING:
    from storage.objects.store import Store

FORMAT = "refrain.snapshot/1"
MARKER = "marker.json"
STATE_FORMAT = "refrain.state/1"  # of the index of the tensors' pieces
INDEX = "index.json"


class StateFile(StoredRecord):
    """One file of a snapshot."""

    nbytes: int = Field(ge=0)
    digest: str | None  # None where index.json has the digests


class Piece(StoredRecord):
    """A part of a tensor, and where its bytes are."""

    file: StoredKey  # within the snapshot's folder
    place: tuple[int, int] = Field(alias="bytes")  # start and stop in the file
    dtype: str  # safetensors code
    shape: tuple[int, ...]
    offsets: tuple[int, ...]  # of its first element in the tensor; () for its beginning
    digest: str

    @model_validator(mode="after")
    def _its_bytes_fit(self) -> Self:
        start, stop = self.place
        if self.dtype not in DTYPES:
            raise ValueError(f"its number format is {self.dtype!r:.40}")
        nbytes = math.prod(self.shape) * DTYPES[self.dtype][0]
        if min((start, *self.shape, *self.offsets)) < 0 or stop - start != nbytes:
            raise ValueError(
                f"a piece of the shape {str(list(self.shape))[:80]} takes the bytes {start} to {stop}"
            )
        return self


class StateTensor(StoredRecord):
    """A tensor of the state."""

    shape: tuple[int, ...]
    chunks: tuple[Piece, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _pieces_lie_within(self) -> Self:
        for piece in self.chunks:
            at = piece.offsets or (0,) * len(self.shape)
            if len(at) != len(self.shape) or len(piece.shape) != len(self.shape):
                raise ValueError(f"a piece has {len(piece.shape)} dimensions of {len(self.shape)}")
            ends = (first + size for first, size in zip(at, piece.shape, strict=True))
            if any(end > size for end, size in zip(ends, self.shape, strict=True)):
                raise ValueError("a piece reaches past the tensor's end")
        if {piece.dtype for piece in self.chunks} != {self.chunks[0].dtype}:
            raise ValueError("its pieces are of several number formats")
        if sum(math.prod(piece.shape) for piece in self.chunks) < math.prod(self.shape):
            raise ValueError("its pieces do not make it whole")
        return self


class State(StoredRecord):
    """The index of a snapshot: its numbers and tensors."""

    facts: dict[str, int]
    tensors: dict[str, StateTensor]


class Snapshot(StoredRecord):
    """The marker of a snapshot: the trainer's state after `step`."""

    step: int
    key: str  # folder, relative to the store
    files: dict[StoredKey, StateFile]  # by path below the folder


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
    return [step for step in run.state_steps() if is_marked(run, step)]


def is_marked(run: RunStore, step: int) -> bool:
    """Whether there is a snapshot after a step."""
    return run.store.exists(f"{run.state_key(step)}/{MARKER}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayStart:
    """The nearest point at or below a version from which the trainer's state can be rebuilt."""

    version: int  # in the run that asks
    run: str = ""  # whose snapshot it is
    step: int = 0  # of the snapshot, in that run
    weights: WeightsRef | None = None  # load these, with a fresh optimizer, instead of a snapshot


def base_of(run: RunStore, version: int) -> ReplayStart | None:
    """Where to begin for the state of a version; None: at the model's own weights, version 0.

    Raises ObjectMissing for a run that goes on with its parent's state while that is stored only
    as an older snapshot and batches: the parent's own settings must replay it first.
    """
    steps = [step for step in snapshots(run) if step <= version]
    if steps:
        return ReplayStart(version=steps[-1], run=run.run, step=steps[-1])
    origin = origin_of(run)
    if origin is None:
        return None
    if not origin.trainer_state:  # the weights are the policy's: others begin anew
        anew = run.role != "actor"
        return None if anew else ReplayStart(version=origin.at, weights=origin.weights)
    parent_start = base_of(parent_of(run, origin), origin.step)
    if parent_start is None or parent_start.version != origin.step:
        raise ObjectMissing(f"There is no snapshot of {origin}, at which run {run.run} begins.")
    return ReplayStart(version=origin.at, run=parent_start.run, step=parent_start.step)


def has_base(run: RunStore, version: int) -> bool:
    """Whether the state of a version can be rebuilt under the run's own settings."""
    try:
        base_of(run, version)
    except ObjectMissing:
        return False
    return True


def read_state(store: Store, folder: str) -> State:
    """The index of the snapshot in a folder, whose pieces lie within the files that its marker names.

    Raises ObjectMissing, ObjectDamaged.
    """
    marker, index = f"{folder}/{MARKER}", f"{folder}/{INDEX}"
    files = documents.validated(Snapshot, marker, documents.read(store, marker, FORMAT)).files
    state = documents.validated(State, index, documents.read(store, index, STATE_FORMAT))
    for name, tensor in state.tensors.items():
        for piece in tensor.chunks:
            if piece.file not in files or piece.place[1] > files[piece.file].nbytes:
                raise ObjectDamaged(
                    f"Object {index} is no valid state: tensor {name!r:.80} ends at byte "
                    f"{piece.place[1]} of {piece.file}, after the file."
                )
    return state


def check_pieces(run: RunStore, folder: str) -> None:
    """Read every piece of every tensor that a snapshot's index lists, and compare its digest.

    Raises ObjectMissing, and ObjectDamaged naming the tensor.
    """
    for name, tensor in read_state(run.store, folder).tensors.items():
        for piece in tensor.chunks:
            key, (start, stop) = f"{folder}/{piece.file}", piece.place
            if digest(run.store.read_ranges([(key, start, stop)])[0]) != piece.digest:
                raise ObjectDamaged(
                    f"Object {key} is damaged: the digest of tensor {name!r} does not match."
                )
