"""Policy versions: safetensors shards that transformers and vLLM load as they are, and a manifest.

`publish` writes `weights/v000012/`: model-0000i-<token>.safetensors, model.safetensors.index.json,
the files given (config.json, the tokenizer's), and manifest.json last. A version without a manifest
does not exist. `stream` gives the tensors back, each checked.

A manifest may name a base: another version, without which this one cannot be read. Retention, forks
and the audit keep to that whatever it is made of.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from storage.batches import tensors as torch_bytes
from storage.batches.format import DTYPES
from storage.objects import documents
from storage.objects.digests import Digester, digest, digest_lines
from storage.objects.errors import ObjectDamaged, ObjectMissing, StoreError
from storage.runs.run_store import RunStore

if TYPE_CHECKING:
    import torch

    from storage.objects.store import Store

FORMAT = "refrain.weights/2"
MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 512 * 2**20
WINDOW_BYTES = 64 * 2**20  # read at once by `stream`; one window more is read ahead

# A manifest of version 1 is one of a whole version, and says no less.
READERS: dict[str, documents.Reader] = {FORMAT: dict, "refrain.weights/1": dict}


class Frozen(BaseModel):
    """A record that is read back from a store; fields of later versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Base(Frozen):
    """The version without which another one cannot be read."""

    key: str  # folder, relative to the store
    digest: str  # of its tensors


class WeightsRef(Frozen):
    """A handle to a policy version: small, JSON by `model_dump`."""

    version: int
    key: str  # folder, relative to the store
    digest: str  # of the tensors: names, types, shapes, bytes (see `weights_digest`)
    nbytes: int  # of the tensors
    base: Base | None = None  # None: the version is whole


class TensorEntry(Frozen):
    """Where a tensor lies."""

    file: str
    dtype: str  # safetensors code
    shape: tuple[int, ...]
    start: int  # byte in the file
    stop: int
    digest: str


class FileEntry(Frozen):
    nbytes: int
    digest: str


class Manifest(Frozen):
    """What a version holds; the last file of it that is written."""

    version: int
    digest: str
    nbytes: int
    tensors: dict[str, TensorEntry]  # in the order in which they were published
    files: dict[str, FileEntry]
    base: Base | None = None  # None: the version is whole


def tensor_digest(tensor: torch.Tensor) -> str:
    """The digest of a tensor's bytes, wherever it is."""
    return digest(torch_bytes.bytes_of(tensor).data)


def weights_digest(entries: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """One digest of (name, safetensors dtype code, shape, digest) of every tensor, in any order.

    An engine that computes it from what it loaded gets `WeightsRef.digest`.
    """
    lines = ([name, dtype, list(shape), each] for name, dtype, shape, each in sorted(entries))
    return digest_lines(lines)


def publish(
    store: Store,
    run: str,
    version: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    files: Mapping[str, bytes],
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> WeightsRef:
    """Write a policy version and return its ref.

    `tensors` may be a generator: at most `shard_bytes` of them are held at once. Floating-point
    ones are cast to `dtype`, each as it is written. Publishing a version again with the same
    tensors is a no-op; with others it raises StoreError, and the first stays as it was.
    """
    key = RunStore(store, run).weights_key(version)
    named = _distinct(tensors)
    existing = _manifest(store, key)
    if existing is not None:
        return _same(existing, key, _digest_of(named, dtype))
    token = uuid.uuid4().hex[:8]  # two writers at once must not mix their shards
    entries: dict[str, TensorEntry] = {}
    written: dict[str, FileEntry] = {}
    for number, shard in enumerate(_shards(named, dtype, shard_bytes), 1):
        name = f"model-{number:05d}-{token}.safetensors"
        written[name] = _write_shard(store, f"{key}/{name}", name, shard, dtype, entries)
    others = {**files, INDEX: _index(entries)}
    manifest = Manifest(
        version=version,
        digest=weights_digest((n, e.dtype, e.shape, e.digest) for n, e in entries.items()),
        nbytes=sum(entry.stop - entry.start for entry in entries.values()),
        tensors=entries,
        files=written
        | {n: FileEntry(nbytes=len(data), digest=digest(data)) for n, data in others.items()},
    )
    if not _finish(store, key, manifest, others):
        store.delete([f"{key}/{name}" for name in written])
        return _same(open_manifest_at(store, key), key, manifest.digest)
    return _ref(manifest, key)


def _finish(store: Store, key: str, manifest: Manifest, others: Mapping[str, bytes]) -> bool:
    """Write the small files and then the manifest; False when another writer has one there."""
    if _manifest(store, key) is not None:
        return False
    for name, data in others.items():
        store.write(f"{key}/{name}", data)
    data = documents.encode(FORMAT, manifest.model_dump(mode="json"))
    if store.create(f"{key}/{MANIFEST}", data):
        known = {f"{key}/{name}" for name in (*manifest.files, MANIFEST)}
        store.delete([left for left in store.list(key) if left not in known])  # of dead writers
        return True
    # Its index may have been replaced by ours a moment ago.
    store.write(f"{key}/{INDEX}", _index(open_manifest_at(store, key).tensors))
    return False


def _distinct(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    seen = set()
    for name, tensor in tensors:
        if name in seen:
            raise ValueError(f"Tensor {name!r} is published twice.")
        seen.add(name)
        yield name, tensor


def _same(existing: Manifest, key: str, found: str) -> WeightsRef:
    if existing.digest != found:
        raise StoreError(
            f"Policy version {existing.version} is already published at {key} with digest "
            f"{existing.digest}, not {found}. Publish other weights under another version."
        )
    return _ref(existing, key)


def _ref(manifest: Manifest, key: str) -> WeightsRef:
    return WeightsRef(
        version=manifest.version,
        key=key,
        digest=manifest.digest,
        nbytes=manifest.nbytes,
        base=manifest.base,
    )


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _type(tensor: torch.Tensor, dtype: torch.dtype | None) -> str:
    cast = dtype is not None and tensor.is_floating_point()
    return torch_bytes.code_of(dtype if cast and dtype is not None else tensor.dtype)


def _digest_of(named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None) -> str:
    return weights_digest(
        (name, _type(tensor, dtype), tuple(tensor.shape), tensor_digest(_cast(tensor, dtype)))
        for name, tensor in named
    )


def _shards(
    named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None, limit: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors gathered until the next would make more than `limit` bytes."""
    shard: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in named:
        size = tensor.numel() * DTYPES[_type(tensor, dtype)][0]
        if shard and held + size > limit:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor
        held += size
    if shard:
        yield shard


def _write_shard(
    store: Store,
    key: str,
    file: str,
    shard: dict[str, torch.Tensor],
    dtype: torch.dtype | None,
    entries: dict[str, TensorEntry],
) -> FileEntry:
    """Write one safetensors file, tensor by tensor, and add its tensors to `entries`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    edges = [0]
    for name, tensor in shard.items():
        code = _type(tensor, dtype)
        edges.append(edges[-1] + tensor.numel() * DTYPES[code][0])
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": edges[-2:]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    head = len(text).to_bytes(8, "little") + text
    total = Digester()
    total.update(head)
    with store.write_stream(key) as out:
        out.write(head)
        for (name, tensor), (start, stop) in zip(shard.items(), pairwise(edges), strict=True):
            data = torch_bytes.bytes_of(_cast(tensor, dtype)).data
            if data.nbytes:
                out.write(data)
            total.update(data)
            entries[name] = TensorEntry(
                file=file,
                dtype=_type(tensor, dtype),
                shape=tuple(tensor.shape),
                start=len(head) + start,
                stop=len(head) + stop,
                digest=digest(data),
            )
    return FileEntry(nbytes=len(head) + edges[-1], digest=total.digest())


def _index(entries: Mapping[str, TensorEntry]) -> bytes:
    index = {
        "metadata": {"total_size": sum(entry.stop - entry.start for entry in entries.values())},
        "weight_map": {name: entry.file for name, entry in entries.items()},
    }
    return json.dumps(index, indent=1).encode()


def _manifest(store: Store, key: str) -> Manifest | None:
    try:
        return open_manifest_at(store, key)
    except ObjectMissing:
        return None


def open_manifest_at(store: Store, key: str) -> Manifest:
    """The manifest in the folder `key`. Raises ObjectMissing, ObjectDamaged."""
    manifest = f"{key}/{MANIFEST}"
    body = documents.decode_version(READERS, manifest, store.read(manifest))
    return documents.validated(Manifest, manifest, body)


def open_manifest(store: Store, ref: WeightsRef | Base) -> Manifest:
    """The manifest of the version that `ref` means. Raises ObjectMissing, ObjectDamaged."""
    manifest = open_manifest_at(store, ref.key)
    found = weights_digest((n, e.dtype, e.shape, e.digest) for n, e in manifest.tensors.items())
    if not manifest.digest == ref.digest == found:
        raise ObjectDamaged(
            f"Object {ref.key}/{MANIFEST} is not the version that the reference names: "
            f"its tensors have digest {found}, the reference says {ref.digest}."
        )
    return manifest


def open_chain(store: Store, ref: WeightsRef | Base) -> list[tuple[str, Manifest]]:
    """Folder and manifest of a version, of its base, of that one's base, and so on.

    All that must be there for the version to be read. Raises ObjectMissing, ObjectDamaged.
    """
    found: list[tuple[str, Manifest]] = []
    wanted: WeightsRef | Base | None = ref
    while wanted is not None:
        if any(key == wanted.key for key, _ in found):
            raise ObjectDamaged(
                f"Object {wanted.key}/{MANIFEST} is, by way of others, its own base."
            )
        found.append((wanted.key, open_manifest(store, wanted)))
        wanted = found[-1][1].base
    return found


def stream(
    store: Store, ref: WeightsRef, names: Container[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a version (or those `names`), in the order in which they were published.

    From local files they map the file's pages privately, without a copy; from elsewhere at most
    two windows of 64 MiB are held beside what the caller keeps. Each tensor's digest is checked:
    raises ObjectMissing, and ObjectDamaged naming the tensor.
    """
    manifest = open_manifest(store, ref)
    windows = _windows(manifest, names)
    for window, views in _read_ahead(store, ref.key, manifest, windows):
        for name in window:
            yield name, _tensor(ref.key, name, manifest.tensors[name], views.pop(name))


def _read_ahead(
    store: Store, key: str, manifest: Manifest, windows: list[list[str]]
) -> Iterator[tuple[list[str], dict[str, memoryview]]]:
    """The names and bytes of each window; of a remote store the next one is already coming."""
    if not store.backend.remote:  # mapping costs nothing
        for window in windows:
            yield window, _read(store, key, manifest, window)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="weights") as pool:
        coming = [pool.submit(_read, store, key, manifest, window) for window in windows[:1]]
        for number, window in enumerate(windows):
            views = coming.pop().result()
            for following in windows[number + 1 : number + 2]:
                coming.append(pool.submit(_read, store, key, manifest, following))
            yield window, views


def _windows(manifest: Manifest, wanted: Container[str] | None) -> list[list[str]]:
    """Names in order, gathered to about WINDOW_BYTES of one file."""
    windows: list[list[str]] = []
    held, file = WINDOW_BYTES, ""
    for name, entry in manifest.tensors.items():
        if wanted is not None and name not in wanted:
            continue
        if held >= WINDOW_BYTES or entry.file != file:
            windows.append([])
            held, file = 0, entry.file
        windows[-1].append(name)
        held += entry.stop - entry.start
    return windows


def _read(store: Store, key: str, manifest: Manifest, names: list[str]) -> dict[str, memoryview]:
    entries = [manifest.tensors[name] for name in names]
    ranges = [(f"{key}/{entry.file}", entry.start, entry.stop) for entry in entries]
    return dict(zip(names, store.read_ranges(ranges), strict=True))


def _tensor(key: str, name: str, entry: TensorEntry, view: memoryview) -> torch.Tensor:
    where = f"tensor {name!r} of object {key}/{entry.file}"
    if view.nbytes < entry.stop - entry.start:
        raise ObjectDamaged(f"The {where} is damaged: the object ends within it.")
    if digest(view) != entry.digest:
        raise ObjectDamaged(f"The {where} is damaged: its digest does not match.")
    import numpy as np

    values = np.frombuffer(bytearray(view) if view.readonly else view, np.uint8)
    return torch_bytes.tensor_of(values, entry.dtype, entry.shape)
