"""Reading what a run's store holds, byte by byte, against what its records say of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from storage.batches.reading import columns_of
from storage.batches.ref_columns import Source
from storage.batches.refs import BatchRef
from storage.objects import documents
from storage.objects.documents import Digester, digest
from storage.objects.errors import ObjectDamaged, ObjectMissing
from storage.objects.store import Store
from storage.runs import snapshots, weights
from storage.runs.commit_log import Commit
from storage.runs.run_store import TRAINED_ROLES, RunStore
from storage.runs.weights import MANIFEST, WeightsRef

WINDOW_BYTES = 64 * 2**20


@dataclass(kw_only=True, slots=True)
class Read:
    """What an audit has read, each object once."""

    objects: int = 0
    nbytes: int = 0
    done: set[str] = field(default_factory=set)  # keys

    def count(self, key: str, nbytes: int) -> None:
        self.done.add(key)
        self.objects += 1
        self.nbytes += nbytes


def sources_of(commit: Commit) -> dict[str, Source]:
    """Every batch object that a commit names, by key."""
    return sources_in(commit.refs.values())


def sources_in(refs: Iterable[BatchRef]) -> dict[str, Source]:
    """Every batch object that refs name, by key."""
    columns = (column for ref in refs for column in ref.columns.values())
    return {source.key: source for column in columns for source in column.sources}


def check_batch(store: Store, source: Source, read: Read) -> None:
    """Read a batch object whole. Raises ObjectMissing, ObjectDamaged naming the column."""
    if source.key in read.done:
        return
    view = memoryview(store.read(source.key))  # one request; not through the cache
    read.count(source.key, view.nbytes)
    head = view[: source.head]
    if digest(head) != source.digest:
        raise ObjectDamaged(f"Object {source.key} is damaged: its head is not the one written.")
    for name, column in columns_of(source.key, head, source.rows).items():
        if digest(view[column.start : column.stop]) != column.digest:
            raise ObjectDamaged(
                f"Object {source.key} is damaged: the digest of column {name!r} does not match."
            )


def check_version(store: Store, key: str, ref: WeightsRef | None, read: Read) -> list[str]:
    """Read a policy version's files, and those of its base; returns its own. Raises ObjectMissing,
    ObjectDamaged.

    `ref`: what a commit says of it, where one does.
    """
    if ref is None:
        manifest = weights.open_manifest_at(store, key)
    else:
        manifest = weights.open_manifest(store, ref)
    chain = [] if manifest.base is None else weights.open_chain(store, manifest.base)
    for folder, part in [(key, manifest), *chain]:
        for name, entry in part.files.items():
            _check_file(store, f"{folder}/{name}", entry.nbytes, entry.digest, read)
    return [f"{key}/{name}" for name in (*manifest.files, MANIFEST)]


def _check_file(store: Store, key: str, nbytes: int, expected: str, read: Read) -> None:
    size = store.size(key)
    if size != nbytes:
        raise ObjectDamaged(f"Object {key} is damaged: {size} bytes of {nbytes}.")
    if key in read.done:
        return
    total = Digester()
    for start in range(0, nbytes, WINDOW_BYTES):
        stop = min(start + WINDOW_BYTES, nbytes)
        total.update(store.read_ranges([(key, start, stop)])[0])
    read.count(key, nbytes)
    if total.digest() != expected:
        raise ObjectDamaged(f"Object {key} is damaged: its digest does not match.")


def check_snapshot(run: RunStore, folder: str, read: Read) -> list[str]:
    """Read a trainer snapshot whole; returns its files. Raises ObjectMissing, ObjectDamaged."""
    marker = f"{folder}/{snapshots.MARKER}"
    body = documents.read(run.store, marker, snapshots.FORMAT)
    snapshot = snapshots.Snapshot.model_validate(body)
    for name, file in snapshot.files.items():
        key = f"{folder}/{name}"
        size = run.store.size(key)
        if size != file.nbytes:
            raise ObjectDamaged(f"Object {key} is damaged: {size} bytes of {file.nbytes}.")
        if file.digest is not None:
            _check_file(run.store, key, file.nbytes, file.digest, read)
        elif key not in read.done:
            read.count(key, size)
    if snapshots.INDEX in snapshot.files:
        snapshots.check_pieces(run, folder)
    return [f"{folder}/{name}" for name in (*snapshot.files, snapshots.MARKER)]


def state_folders(run: RunStore) -> Iterator[tuple[int, str]]:
    """Step and folder of every trainer snapshot below the run, of any role, finished or not."""
    for role in TRAINED_ROLES:
        trained = replace(run, role=role)
        for step in trained.state_steps():
            yield step, trained.state_key(step)


def marked_objects(store: Store, markers: Iterable[str]) -> dict[str, set[str]]:
    """Stage markers, each with the batch objects that its record names."""
    objects = {}
    for key in markers:
        try:
            text = json.loads(store.read(key))
            sources = text["body"]["ref"]["sources"]
            objects[key] = {str(source[0]) for source in sources}
        except (ValueError, KeyError, TypeError, IndexError, ObjectMissing):
            objects[key] = set()
    return objects
