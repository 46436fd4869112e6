"""Writing a policy version (see weights.py): shards by one writer or several, then the manifest.

`publish` is the whole of it for one writer. Several, as the ranks of a gang are
(engines/train/publication.py), agree on `cut`, each writes its shards by `write_shard`, and one of
them calls `finish`. Where shards go to the store behind what the machine keeps, `announce` lets its
readers have the version before that.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from storage.batches import tensors as torch_bytes
from storage.batches.format import DTYPES, head_of
from storage.objects import documents
from storage.objects.documents import Digester, digest
from storage.objects.errors import VersionTaken
from storage.objects.node_cache import announced
from storage.runs.run_store import RunStore
from storage.runs.tensor_changes import encode
from storage.runs.weights import (
    ADAPTER_FORMAT,
    FILE_NAMES,
    FORMAT,
    MANIFEST,
    Adapter,
    BaseTensors,
    BaseVersion,
    FileEntry,
    Form,
    Manifest,
    TensorEntry,
    TensorOutline,
    WeightFile,
    WeightsRef,
    adapter_digest,
    find_manifest,
    open_chain,
    open_manifest_at,
    read_file_names,
    stream,
    tensor_digest,
    weights_digest,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from typing_extensions import Buffer

    from storage.objects.node_cache import Behind
    from storage.objects.store import Store

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 512 * 2**20
CHUNK = (
    4 * 2**20
)  # bytes hashed for tensor and file, and written, while a core has them in its cache

WORTHWHILE = 0.5  # of a tensor's bytes; a larger difference takes long to make and to read


def outline_of(tensor: torch.Tensor, dtype: torch.dtype | None) -> TensorOutline:
    """Of a tensor that is cast to `dtype` (None: as it is), which only floating-point ones are."""
    cast = dtype is not None and tensor.is_floating_point()
    code = torch_bytes.code_of(dtype if cast and dtype is not None else tensor.dtype)
    return TensorOutline(dtype=code, shape=tuple(tensor.shape))


def cut(
    outlines: Mapping[str, TensorOutline], writers: int, limit: int = SHARD_BYTES
) -> list[list[str]]:
    """Names of the tensors of each shard, in order; enough shards for so many writers.

    A shard ends before the tensor with which it would have more than `limit` bytes.
    """
    limit = min(limit, -(-sum(outline.nbytes for outline in outlines.values()) // writers))
    shards: list[list[str]] = []
    nbytes = 0
    for name, outline in outlines.items():
        if not shards or (nbytes and nbytes + outline.nbytes > limit):
            shards.append([])
            nbytes = 0
        shards[-1].append(name)
        nbytes += outline.nbytes
    return shards


def shard_name(number: int, token: str) -> str:
    """`token`: of the attempt, for two writers at once must not mix their shards."""
    return f"model-{number + 1:05d}-{token}.safetensors"


def new_token() -> str:
    return uuid.uuid4().hex[:8]


def _bytes_of(tensor: torch.Tensor, outline: TensorOutline) -> Iterable[memoryview]:
    return [torch_bytes.bytes_of(tensor).data]


def write_shard(
    store: Store,
    key: str,
    file: str,
    outlines: Mapping[str, TensorOutline],
    tensors: Iterable[tuple[str, torch.Tensor]],
    behind: Behind | None = None,
    pieces: Callable[[torch.Tensor, TensorOutline], Iterable[memoryview]] = _bytes_of,
) -> WeightFile:
    """Write a safetensors file into the folder `key`, tensor by tensor as they come.

    tensors: those of `outlines`, in that order, each as its outline says. behind: by way of which the
    file goes to the store; None: straight. pieces: gives a tensor's bytes in order, as its outline
    says; each piece is done with when the next is asked for.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    edges = [0]
    for name, outline in outlines.items():
        edges.append(edges[-1] + outline.nbytes)
        header[name] = {
            "dtype": outline.dtype,
            "shape": list(outline.shape),
            "data_offsets": edges[-2:],
        }
    head = head_of(header)
    total = Digester()
    total.update(head)
    entries = {}
    with (_straight(store) if behind is None else behind.written)(
        f"{key}/{file}", len(head) + edges[-1]
    ) as put:
        put(head)
        for (expected, outline), (start, stop), (name, tensor) in zip(
            outlines.items(), pairwise(edges), tensors, strict=True
        ):
            digester, nbytes = Digester(), 0
            for piece in pieces(tensor, outline):
                for at in range(0, piece.nbytes, CHUNK):
                    chunk = piece[at : at + CHUNK]
                    digester.update(chunk)
                    total.update(chunk)
                    put(chunk)
                nbytes += piece.nbytes
            assert (name, nbytes) == (expected, outline.nbytes)
            entries[name] = TensorEntry(
                file=file,
                dtype=outline.dtype,
                shape=outline.shape,
                start=len(head) + start,
                stop=len(head) + stop,
                digest=digester.digest(),
            )
    entry = FileEntry(nbytes=len(head) + edges[-1], digest=total.digest())
    return WeightFile(name=file, file=entry, tensors=entries)


def _straight(
    store: Store,
) -> Callable[[str, int], AbstractContextManager[Callable[[Buffer], object]]]:
    @contextmanager
    def written(key: str, size: int) -> Iterator[Callable[[Buffer], object]]:
        with store.write_stream(key) as out:
            yield out.write

    return written


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """A version whose shards are written: its manifest, and the small files beside it."""

    key: str  # folder
    manifest: Manifest
    others: Mapping[str, bytes]

    @property
    def ref(self) -> WeightsRef:
        return _ref(self.manifest, self.key)


def contents(
    key: str,
    version: int,
    parts: Sequence[WeightFile],
    files: Mapping[str, bytes],
    base: BaseVersion | None = None,
    adapter: Adapter | None = None,
) -> Contents:
    """What a version is made of.

    parts: all of them, in the order in which their tensors are published; base: from which they are
    the difference, and then `files` are the base's; adapter: they are factors of one on the base.
    """
    entries = {name: entry for part in parts for name, entry in part.tensors.items()}
    others = {**files, INDEX: _index(entries)} if base is None else dict(files if adapter else {})
    manifest = Manifest(
        version=version,
        digest="",
        nbytes=sum(entry.nbytes for entry in entries.values()),
        tensors=entries,
        files={part.name: part.file for part in parts}
        | {n: FileEntry(nbytes=len(data), digest=digest(data)) for n, data in others.items()},
        base=base,
        adapter=adapter,
    )
    manifest = manifest.model_copy(update={"digest": manifest.content})
    return Contents(key=key, manifest=manifest, others=others)


def finish(store: Store, version: Contents) -> WeightsRef:
    """Write the small files and then the manifest of a version whose shards are there.

    Where another writer was faster the shards are removed, and its version stands; VersionTaken if
    that is another one.
    """
    key, manifest = version.key, version.manifest
    if not _create(store, key, manifest, version.others):
        shards = [f"{key}/{name}" for name in manifest.files if name not in version.others]
        store.delete([*shards, announced(f"{key}/{MANIFEST}")])
        return same(open_manifest_at(store, key), key, manifest.digest)
    return version.ref


def announce(behind: Behind, version: Contents) -> WeightsRef:
    """Let this machine read a version whose shards were written, before the store has it."""
    behind.announce(f"{version.key}/{MANIFEST}", _encoded(version.manifest))
    return version.ref


def publish(
    store: Store,
    run: str,
    version: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    files: Mapping[str, bytes],
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    base: BaseVersion | None = None,
    *,
    adapter: Adapter | None = None,
    key: str | None = None,
) -> WeightsRef:
    """Write a policy version and return its ref.

    `tensors` may be a generator: at most `shard_bytes` of them are held at once. Floating-point
    ones are cast to `dtype`, each as it is written. Publishing a version again with the same
    tensors is a no-op; with others it raises VersionTaken, and the first stays as it was.

    base: a whole version of the same tensors, from which this one is stored as the difference.
    adapter: the tensors are factors of one on the base instead.
    key: the folder, if not that of the version's number in the run.
    """
    key = key or RunStore(store, run).weights_key(version)
    named = _distinct(tensors)
    existing = find_manifest(store, key)
    if existing is not None:
        content = _digest_of(named, dtype)
        if adapter is not None and base is not None:
            content = adapter_digest(content, adapter, base.digest)
        return same(existing, key, content)
    token, parts = new_token(), []
    before = None if base is None or adapter is not None else BaseTensors(store, base)
    for number, shard in enumerate(_shards(named, dtype, shard_bytes)):
        outlines = {name: outline_of(tensor, dtype) for name, tensor in shard.items()}
        cast = ((name, _cast(tensor, dtype)) for name, tensor in shard.items())
        if before is None:
            parts.append(write_shard(store, key, shard_name(number, token), outlines, cast))
        else:
            name = changes_name(number, token)
            parts.append(write_changes(store, key, name, outlines, cast, before))
    return finish(store, contents(key, version, parts, files, base, adapter))


def copy_whole(
    store: Store,
    ref: WeightsRef,
    target: Store,
    key: str,
    tensors: Iterable[tuple[str, torch.Tensor]] | None = None,
) -> WeightsRef:
    """Write a version into the folder `key` of a store, whole, however it is stored itself.

    It then has the names and the form of the model's files, if it says what those are.

    tensors: of an adapter, its base's with its own factors merged into them.

    Raises ObjectMissing, and ObjectDamaged naming the tensor.
    """
    folder, manifest = open_chain(store, ref)[-1]  # a difference has no files of its own
    small = [name for name in manifest.files if not name.endswith(".safetensors") and name != INDEX]
    files = {name: store.read(f"{folder}/{name}") for name in small}
    names = read_file_names(files.pop(FILE_NAMES, None))
    as_in_files = names.apart(tensors or stream(store, ref))
    return publish(target, "", ref.version, as_in_files, files, key=key)


def same(existing: Manifest, key: str, content: str) -> WeightsRef:
    """The ref of a version that is there; VersionTaken where `content` is not its digest."""
    if existing.digest != content:
        raise VersionTaken(
            f"Policy version {existing.version} is already published at {key} with digest "
            f"{existing.digest}, not {content}. Publish other weights under another version."
        )
    return _ref(existing, key)


def _create(store: Store, key: str, manifest: Manifest, others: Mapping[str, bytes]) -> bool:
    """Write the small files and then the manifest; False when another writer has one there."""
    if find_manifest(store, key) is not None:
        return False
    for name, data in others.items():
        store.write(f"{key}/{name}", data)
    if store.create(f"{key}/{MANIFEST}", _encoded(manifest)):
        names = {f"{key}/{name}" for name in (*manifest.files, MANIFEST)}
        store.delete([file for file in store.list(key) if file not in names])  # of dead writers
        return True
    first = open_manifest_at(store, key)
    if INDEX in first.files:  # it may have been replaced by ours a moment ago
        store.write(f"{key}/{INDEX}", _index(first.tensors))
    store.delete([f"{key}/{name}" for name in others if name not in first.files])
    return False


def _encoded(manifest: Manifest) -> bytes:
    form = FORMAT if manifest.adapter is None else ADAPTER_FORMAT
    body = manifest.model_dump(mode="json", exclude={"adapter"} if form == FORMAT else None)
    return documents.encode(form, body)


def _ref(manifest: Manifest, key: str) -> WeightsRef:
    return WeightsRef(
        version=manifest.version,
        key=key,
        digest=manifest.digest,
        nbytes=manifest.nbytes,
        base=manifest.base,
        stored=sum(file.nbytes for file in manifest.files.values()),
    )


def _distinct(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    names = set()
    for name, tensor in tensors:
        if name in names:
            raise ValueError(f"Tensor {name!r} is published twice.")
        names.add(name)
        yield name, tensor


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _digest_of(named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None) -> str:
    casts = ((name, _cast(tensor, dtype)) for name, tensor in named)
    outlines = ((name, outline_of(tensor, None), tensor_digest(tensor)) for name, tensor in casts)
    return weights_digest(
        (name, outline.dtype, outline.shape, content) for name, outline, content in outlines
    )


def _shards(
    named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None, limit: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors gathered until the next would make more than `limit` bytes."""
    shard: dict[str, torch.Tensor] = {}
    nbytes = 0
    for name, tensor in named:
        size = outline_of(tensor, dtype).nbytes
        if shard and nbytes + size > limit:
            yield shard
            shard, nbytes = {}, 0
        shard[name] = tensor
        nbytes += size
    if shard:
        yield shard


def _index(entries: Mapping[str, TensorEntry]) -> bytes:
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in entries.values())},
        "weight_map": {name: entry.file for name, entry in entries.items()},
    }
    return json.dumps(index, indent=1).encode()


def base_for(
    run: RunStore, version: int, outlines: Mapping[str, TensorOutline], every: int
) -> BaseVersion | None:
    """The version from which the next one is to be stored as the difference; None: store it whole.

    It is the run's last whole one, so that two versions at most are read for one. Whole are every
    `every`-th version, those with no version before them that is made of the same tensors, and those
    after a difference that was hardly smaller than the whole.
    """
    if every == 1 or version == 0:
        return None
    before = find_manifest(run.store, run.weights_key(version - 1))
    if before is None:
        return None
    stored = sum(file.nbytes for file in before.files.values())
    if before.base is not None and stored > WORTHWHILE * before.nbytes:
        return None
    base = before.base or BaseVersion(key=run.weights_key(version - 1), digest=before.digest)
    whole = find_manifest(run.store, base.key)
    if whole is None or whole.base is not None or version - whole.version >= every:
        return None
    in_run = base.key == run.weights_key(whole.version)  # a fork's first base is its parent's
    there = {name: (entry.dtype, entry.shape) for name, entry in whole.tensors.items()}
    tensors = {name: (outline.dtype, outline.shape) for name, outline in outlines.items()}
    return base if in_run and there == tensors else None


def changes_name(number: int, token: str) -> str:
    """No name that a library would take for weights: alone the file means nothing."""
    return f"changes-{number + 1:05d}-{token}.delta"


def write_changes(
    store: Store,
    key: str,
    file: str,
    outlines: Mapping[str, TensorOutline],
    tensors: Iterable[tuple[str, torch.Tensor]],
    base: BaseTensors,
) -> WeightFile:
    """`write_shard` of a version that is stored as the difference from its base."""
    total, entries, place = Digester(), {}, 0
    with store.write_stream(f"{key}/{file}") as out:
        for (expected, outline), (name, tensor) in zip(outlines.items(), tensors, strict=True):
            data = torch_bytes.bytes_of(tensor)
            assert (name, data.nbytes) == (expected, outline.nbytes)
            content = digest(data.data)
            form: Form = "same"
            pieces: list[Buffer] = []
            if content != base.entries[name].digest:
                form, pieces = _changes(data, base.read(name), DTYPES[outline.dtype][0])
            start = place
            for piece in pieces:
                out.write(piece)
                total.update(piece)
                place += memoryview(piece).nbytes
            entries[name] = TensorEntry(
                file=file,
                dtype=outline.dtype,
                shape=outline.shape,
                start=start,
                stop=place,
                digest=content,
                form=form,
            )
    entry = FileEntry(nbytes=place, digest=total.digest())
    return WeightFile(name=file, file=entry, tensors=entries)


def _changes(new: np.ndarray, old: np.ndarray, itemsize: int) -> tuple[Form, list[Buffer]]:
    pieces: list[Buffer] = [*encode(new, old, itemsize)]
    if sum(memoryview(piece).nbytes for piece in pieces) < WORTHWHILE * new.nbytes:
        return "changed", pieces
    return "whole", [new.data]
