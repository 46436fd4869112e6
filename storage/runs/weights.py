"""Policy versions: safetensors shards that transformers and vLLM load as they are, and a manifest.

`weights/v000012/` holds model-0000i-<token>.safetensors, model.safetensors.index.json, the files
given (config.json, the tokenizer's), and manifest.json, which is written last: a version without a
manifest does not exist. Written by weights_writing.py.

A manifest may name a base: another version, without which this one cannot be read. Retention, forks
and the audit keep to that whatever it is made of. A version that is stored as the difference from its
base has changes-0000i-<token>.delta and the manifest alone. The tensors of an adapter are factors
that are merged into its base's (adapters.py).

transformers makes one tensor of the experts of a layer, which most checkpoints hold apart. Versions
have its form, which is fewer tensors; beside them lies how the model's files have them.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from storage.batches import tensors as torch_bytes
from storage.batches.format import DTYPES
from storage.objects import documents
from storage.objects.backends import Range, StoredKey
from storage.objects.documents import StoredRecord, digest, digest_lines
from storage.objects.errors import ObjectDamaged, ObjectMissing
from storage.objects.node_cache import announced
from storage.runs.tensor_changes import decode

if TYPE_CHECKING:
    import torch

    from storage.objects.node_cache import NodeCache
    from storage.objects.store import Store

FORMAT = "refrain.weights/2"
ADAPTER_FORMAT = "refrain.adapter/1"
MANIFEST = "manifest.json"

# A manifest of version 1 is one of a whole version, and says no less.
READERS: dict[str, documents.Reader] = {
    FORMAT: dict,
    "refrain.weights/1": dict,
    ADAPTER_FORMAT: dict,
}

logger = logging.getLogger(__name__)

PATIENCE = 600.0  # seconds in which a version that was announced is in the store
Share = tuple[int, int]  # number of a reader, and how many there are
ALL: Share = (0, 1)
LOOKS = (0.1, 2.0)  # seconds between looks for it: at first, and at most
WINDOW_BYTES = 64 * 2**20  # read at once by `stream`; one window more is read ahead
THREADS = 8  # that check windows of local files

FILE_NAMES = "checkpoint_names.json"  # beside a version's tensors, where some differ

# By which MLflow loads a registered version, in its folder of a bucket (registered_files.py).
MLMODEL, REQUIREMENTS, ENVIRONMENT = "MLmodel", "requirements.txt", "python_env.yaml"
COMPONENTS = "components"  # folder


def of_registration(name: str) -> bool:
    """Whether a path in a version's folder is of a file by which MLflow loads the version."""
    return name in (MLMODEL, REQUIREMENTS, ENVIRONMENT) or name.startswith(f"{COMPONENTS}/")


class BaseVersion(StoredRecord):
    """The version without which another one cannot be read."""

    key: StoredKey  # folder, relative to the store
    digest: str  # of its tensors


class WeightsRef(StoredRecord):
    """A handle to a policy version: small, JSON by `model_dump`."""

    version: int
    key: StoredKey  # folder, relative to the store
    digest: str  # of the tensors: names, types, shapes, bytes (see `weights_digest`)
    nbytes: int  # of the tensors
    base: BaseVersion | None = None  # None: the version is whole
    stored: int | None = None  # bytes of its files; None: this was not yet said when it was made


class StackedWeight(StoredRecord):
    """A weight that has those of all experts of a layer, one after the other."""

    name: str
    transposed: bool  # [experts, in, out], not [experts, out, in]


class Adapter(StoredRecord):
    """What the tensors of a version are: two small factors for each weight that it adapts."""

    rank: int = Field(ge=1)
    alpha: float = Field(allow_inf_nan=False)
    experts: tuple[StackedWeight, ...] = ()  # that it adapts, in the order of the model

    @property
    def scale(self) -> float:
        """What the product of two factors is multiplied by."""
        return self.alpha / self.rank


MOST_BYTES = 2**63 - 1  # of a tensor, as torch counts them; of an empty one without its zeros

# How a tensor is stored: its bytes; nothing, for they are the base's; its difference from the base's.
Form = Literal["whole", "same", "changed"]


class TensorEntry(StoredRecord):
    """Where a tensor lies."""

    file: StoredKey  # within the folder
    dtype: str  # safetensors code
    shape: tuple[int, ...]
    start: int  # byte in the file
    stop: int
    digest: str  # of the tensor's bytes, however it is stored
    form: Form = "whole"

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype][0]

    @model_validator(mode="after")
    def _its_bytes_fit(self) -> Self:
        """So that no tensor is read from another one's bytes."""
        if self.dtype not in DTYPES:
            raise ValueError(f"its number format is {self.dtype!r}")
        if min(self.shape, default=0) < 0:
            raise ValueError(f"its shape is {str(list(self.shape))[:80]}")
        if math.prod(size or 1 for size in self.shape) * DTYPES[self.dtype][0] > MOST_BYTES:
            raise ValueError(f"its shape is {str(list(self.shape))[:80]}, more than there can be")
        size = self.stop - self.start
        expected = {"whole": self.nbytes, "same": 0, "changed": max(size, 0)}[self.form]
        if self.start < 0 or size != expected:
            raise ValueError(f"it takes the bytes {self.start} to {self.stop} and needs {expected}")
        return self


def check_places(tensors: Mapping[str, TensorEntry], sizes: Mapping[str, int]) -> None:
    """Raise ValueError where tensors overlap, or reach past the end of their file.

    sizes: bytes of each file.
    """
    ends: dict[str, tuple[int, str]] = {}
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].file, item[1].start)):
        if entry.start == entry.stop:
            continue
        before, other = ends.get(entry.file, (0, ""))
        if entry.start < before:
            raise ValueError(f"tensor {name!r} begins at byte {entry.start}, within {other!r}")
        if entry.stop > sizes.get(entry.file, 0):
            raise ValueError(f"tensor {name!r} ends after {entry.file}, at byte {entry.stop}")
        ends[entry.file] = entry.stop, name


class FileEntry(StoredRecord):
    nbytes: int = Field(ge=0)
    digest: str


class Manifest(StoredRecord):
    """What a version holds; the last file of it that is written."""

    version: int
    digest: str
    nbytes: int
    tensors: dict[str, TensorEntry]  # in the order in which they were published
    files: dict[StoredKey, FileEntry]
    base: BaseVersion | None = None  # None: the version is whole
    adapter: Adapter | None = None  # on the base; None: the tensors are the weights

    @model_validator(mode="after")
    def _tensors_lie_apart(self) -> Self:
        check_places(self.tensors, {name: file.nbytes for name, file in self.files.items()})
        if self.base is None and (
            self.adapter or any(e.form != "whole" for e in self.tensors.values())
        ):
            raise ValueError("it names no base, which an adapter or a difference needs")
        return self

    @property
    def content(self) -> str:
        """The digest that its tensors, as listed, give."""
        entries = ((n, e.dtype, e.shape, e.digest) for n, e in self.tensors.items())
        tensors_digest = weights_digest(entries)
        if self.adapter is None or self.base is None:
            return tensors_digest
        return adapter_digest(tensors_digest, self.adapter, self.base.digest)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorOutline:
    """What a tensor will be when it is written."""

    dtype: str  # safetensors code
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][0]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFile:
    """A file that was written, and the tensors in it."""

    name: str  # of the file, within the version's folder
    file: FileEntry
    tensors: dict[str, TensorEntry]  # in the order in which they lie


def tensor_digest(tensor: torch.Tensor) -> str:
    """The digest of a tensor's bytes, wherever it is."""
    return digest(torch_bytes.bytes_of(tensor).data)


def weights_digest(entries: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """One digest of (name, safetensors dtype code, shape, digest) of every tensor, in any order.

    An engine that computes it from what it loaded gets `WeightsRef.digest`.
    """
    lines = ([name, dtype, list(shape), each] for name, dtype, shape, each in sorted(entries))
    return digest_lines(lines)


def adapter_digest(factors: str, adapter: Adapter, base: str) -> str:
    """The digest of an adapter: of its factors' own, its scale, what it is on, and its base's."""
    experts = [[weight.name, weight.transposed] for weight in adapter.experts]
    return digest_lines([[factors, adapter.rank, adapter.alpha, base, *experts]])


def open_manifest_at(store: Store | NodeCache, key: str) -> Manifest:
    """The manifest in the folder `key`. Raises ObjectMissing, ObjectDamaged."""
    return _decoded(f"{key}/{MANIFEST}", store.read(f"{key}/{MANIFEST}"))


def open_manifest(store: Store | NodeCache, ref: WeightsRef | BaseVersion) -> Manifest:
    """The manifest of the version that `ref` means. Raises ObjectMissing, ObjectDamaged.

    That of a local store may still be on its way to the disk.
    """
    try:
        manifest = open_manifest_at(store, ref.key)
    except ObjectMissing:
        try:
            data = store.read(announced(f"{ref.key}/{MANIFEST}"))
        except ObjectMissing:  # the store has it by now, or never
            data = store.read(f"{ref.key}/{MANIFEST}")
        manifest = _decoded(f"{ref.key}/{MANIFEST}", data)
    content = manifest.content
    if not manifest.digest == ref.digest == content:
        raise ObjectDamaged(
            f"Object {ref.key}/{MANIFEST} is not the version that the reference names: "
            f"its tensors have digest {content}, the reference says {ref.digest}."
        )
    return manifest


def _decoded(key: str, data: bytes) -> Manifest:
    return documents.validated(Manifest, key, documents.decode_version(READERS, key, data))


def open_chain(
    store: Store | NodeCache, ref: WeightsRef | BaseVersion
) -> list[tuple[str, Manifest]]:
    """Folder and manifest of a version, of its base, of that one's base, and so on.

    All that must be there for the version to be read. Raises ObjectMissing, ObjectDamaged.
    """
    chain: list[tuple[str, Manifest]] = []
    current: WeightsRef | BaseVersion | None = ref
    while current is not None:
        if any(key == current.key for key, _ in chain):
            raise ObjectDamaged(
                f"Object {current.key}/{MANIFEST} is, by way of others, its own base."
            )
        chain.append((current.key, open_manifest(store, current)))
        current = chain[-1][1].base
    return chain


def find_manifest(store: Store, key: str) -> Manifest | None:
    """The manifest in the folder `key`, if a version was finished there."""
    try:
        return open_manifest_at(store, key)
    except ObjectMissing:
        return None


def wait_until_readable(
    store: Store, ref: WeightsRef, cache: NodeCache, patience: float = PATIENCE
) -> float:
    """Wait for a version that goes to the store behind its writer's machine; returns the seconds.

    None where this is the machine and all of it is here. Raises ObjectMissing, `patience` seconds
    later, where it does not come.
    """
    began, (pause, longest) = time.monotonic(), LOOKS
    while not (here := _is_here(cache, ref)) and not store.exists(f"{ref.key}/{MANIFEST}"):
        if (waited := time.monotonic() - began) > patience:
            raise ObjectMissing(
                f"Policy version {ref.version} ({ref.key}) is not in the store {waited:.0f} s after "
                "it was announced: its trainer ended, or does not reach the store."
            )
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
    if not here and cache.has(f"{ref.key}/{MANIFEST}"):
        logger.warning("%s is read from the store: this machine has lost a part of it", ref.key)
    return time.monotonic() - began


def _is_here(cache: NodeCache, ref: WeightsRef) -> bool:
    manifest = f"{ref.key}/{MANIFEST}"
    if not cache.has(manifest):
        return False
    try:
        version = open_manifest(cache, ref)
    except ObjectDamaged:  # of an attempt that was given up
        cache.forget(manifest)
        return False
    files = {entry.file for entry in version.tensors.values()}
    return all(cache.has(f"{ref.key}/{file}") for file in files)


class BaseTensors:
    """The tensors of a whole version, from which others are stored as the difference."""

    def __init__(self, store: Store, base: BaseVersion, cache: NodeCache | None = None) -> None:
        self.base = base
        self._source = cache or store
        self.entries = open_manifest(self._source, base).tensors

    def read(self, name: str) -> np.ndarray:
        """A tensor's bytes [bytes] uint8, checked. Raises ObjectMissing, ObjectDamaged."""
        entry = self.entries[name]
        where = (f"{self.base.key}/{entry.file}", entry.start, entry.stop)
        view = self._source.read_ranges([where])[0]
        return _checked(self.base.key, name, entry, np.frombuffer(view, np.uint8))


def stream(
    store: Store,
    ref: WeightsRef | BaseVersion,
    names: Container[str] | None = None,
    cache: NodeCache | None = None,
    share: Share = ALL,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a version (or those `names`), in the order in which they were published.

    From local files they map the file's pages privately, without a copy; from elsewhere at most
    two windows of 64 MiB are held beside what the caller keeps. So are they of a version that is
    stored as the difference from its base. Each tensor's digest is checked: raises ObjectMissing,
    and ObjectDamaged naming the tensor.

    cache: what this machine keeps of the store, which is read in the store's place. share: which
    tensors are checked, where several processes map the same local files at once and check them
    together; others' pages are touched only where the caller does.

    Of an adapter they are its factors (engines/models/adapters.py merges them).
    """
    version = _Version(store, ref, cache, share)
    for window in _read_ahead(version, _windows(version.manifest, names)):
        yield from window


class _Version:
    """A version with what it takes to read its tensors."""

    def __init__(
        self, store: Store, ref: WeightsRef | BaseVersion, cache: NodeCache | None, share: Share
    ) -> None:
        self.key = ref.key
        chain = open_chain(cache or store, ref)
        self.manifest = chain[0][1]
        self._base = chain[1] if len(chain) > 1 else None
        self._store, self._cache = store, cache
        number, readers = share
        self._mine = frozenset(islice(self.manifest.tensors, number, None, readers))
        # What is read or made, and not mapped, takes memory: one window is ahead then.
        forms = {entry.form for entry in self.manifest.tensors.values()}
        self.slow = store.backend.remote or "changed" in forms

    def read(self, names: list[str]) -> list[tuple[str, torch.Tensor]]:
        """The tensors of a window, checked."""
        if self._cache is None:
            return self._read(names, self._store)
        try:
            return self._read(names, self._cache)
        except ObjectDamaged:  # perhaps on this machine alone
            for folder, manifest in filter(None, ((self.key, self.manifest), self._base)):
                for file in manifest.files:
                    self._cache.forget(f"{folder}/{file}")
            return self._read(names, self._store)

    def _read(self, names: list[str], source: Store | NodeCache) -> list[tuple[str, torch.Tensor]]:
        ranges = [self._range(self.key, self.manifest.tensors[name]) for name in names]
        from_base = [name for name in names if self.manifest.tensors[name].form != "whole"]
        ranges += [self._range(*self._in_base(name)) for name in from_base]
        views = source.read_ranges(ranges)
        base = dict(zip(from_base, views[len(names) :], strict=True))
        return [
            (name, self._tensor(name, view, base.get(name)))
            for name, view in zip(names, views, strict=False)
        ]

    @staticmethod
    def _range(key: str, entry: TensorEntry) -> Range:
        return f"{key}/{entry.file}", entry.start, entry.stop

    def _in_base(self, name: str) -> tuple[str, TensorEntry]:
        """Folder and place of a tensor in the base."""
        entry = self.manifest.tensors[name]
        if self._base is not None:
            key, base = self._base
            base_entry = base.tensors.get(name)
            if (
                base_entry is not None
                and base_entry.form == "whole"
                and (base_entry.dtype, base_entry.shape) == (entry.dtype, entry.shape)
            ):
                return key, base_entry
        raise ObjectDamaged(
            f"The tensor {name!r} of {self.key} is stored as a difference, but its base has none "
            "from which it could be one."
        )

    def _tensor(self, name: str, view: memoryview, base: memoryview | None) -> torch.Tensor:
        entry = self.manifest.tensors[name]
        if view.nbytes < entry.stop - entry.start:
            raise ObjectDamaged(
                f"The {_where(self.key, name, entry)} is damaged: the object ends within it."
            )
        values = np.frombuffer(view, np.uint8)
        if base is not None:
            before = np.frombuffer(base, np.uint8)
            values = before if entry.form == "same" else self._changed(name, view, before)
        if name in self._mine:
            _checked(self.key, name, entry, values)
        if not values.flags.writeable:
            values = values.copy()
        return torch_bytes.tensor_of(values, entry.dtype, entry.shape)

    def _changed(self, name: str, view: memoryview, before: np.ndarray) -> np.ndarray:
        entry = self.manifest.tensors[name]
        try:
            return decode(view, before, DTYPES[entry.dtype][0])
        except ObjectDamaged as error:
            where = _where(self.key, name, entry)
            raise ObjectDamaged(f"The {where} is damaged: {error}.") from error


def _read_ahead(
    version: _Version, windows: list[list[str]]
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors of each window; while the caller has one, the next are already coming.

    Of what is read from elsewhere the next one; of local files, which are mapped, several at once.
    """
    ahead = 1 if version.slow else min(THREADS, os.cpu_count() or 1)
    waiting = iter(windows)
    with ThreadPoolExecutor(ahead, thread_name_prefix="weights") as pool:
        coming = deque(pool.submit(version.read, window) for window in islice(waiting, ahead))
        try:
            while coming:
                tensors = coming.popleft().result()
                coming.extend(pool.submit(version.read, window) for window in islice(waiting, 1))
                yield tensors
        finally:  # the caller may have had enough
            for each in coming:
                each.cancel()


def _windows(manifest: Manifest, names: Container[str] | None) -> list[list[str]]:
    """Names in order, gathered to about WINDOW_BYTES of one file."""
    windows: list[list[str]] = []
    nbytes, file = WINDOW_BYTES, ""
    for name, entry in manifest.tensors.items():
        if names is not None and name not in names:
            continue
        if nbytes >= WINDOW_BYTES or entry.file != file:
            windows.append([])
            nbytes, file = 0, entry.file
        windows[-1].append(name)
        nbytes += entry.nbytes
    return windows


def _checked(key: str, name: str, entry: TensorEntry, values: np.ndarray) -> np.ndarray:
    """`values` if they are the tensor's bytes."""
    if digest(values.data) != entry.digest:
        why = (
            "its digest does not match"
            if entry.form == "whole"
            else "with its base, its digest does not match"
        )
        raise ObjectDamaged(f"The {_where(key, name, entry)} is damaged: {why}.")
    return values


def _where(key: str, name: str, entry: TensorEntry) -> str:
    return f"tensor {name!r} of object {key}/{entry.file}"


class Part(StoredRecord):
    """A tensor of the files."""

    name: str
    shape: tuple[int, ...]


class FileNames(StoredRecord):
    """What the files call a version's tensors; those that are not here have one name in both.

    Example:
        renamed = {"lm_head.weight": "embed_out.weight"}
        stacks = {"model.layers.0.mlp.experts.down_proj": (Part(name="….experts.0.w2.weight", …), …)}
    """

    renamed: Mapping[str, str] = Field(default_factory=dict)
    stacks: Mapping[str, tuple[Part, ...]] = Field(default_factory=dict)  # of theirs, in order

    def __bool__(self) -> bool:
        """Whether there is any difference."""
        return bool(self.renamed or self.stacks)

    def apart(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """A version's tensors as the files have them; parts are views of their whole.

        Raises ObjectDamaged naming a tensor that its parts do not make up.
        """
        for name, tensor in tensors:
            if name not in self.stacks:
                yield self.renamed.get(name, name), tensor
                continue
            parts = self.stacks[name]
            sizes = [math.prod(part.shape) for part in parts]
            if min(sizes, default=-1) < 0 or sum(sizes) != tensor.numel():
                raise ObjectDamaged(
                    f"{FILE_NAMES} says that {name} has {sum(sizes)} elements in the model's files, "
                    f"and it has {tensor.numel()}."
                )
            flat = tensor.reshape(-1)
            for part, size, stop in zip(parts, sizes, accumulate(sizes), strict=True):
                yield part.name, flat[stop - size : stop].view(part.shape)


def read_file_names(data: bytes | None) -> FileNames:
    """What lies beside a version's tensors; None: nothing does. ObjectDamaged."""
    if data is None:
        return FileNames()
    try:
        return FileNames.model_validate_json(data)
    except ValidationError as error:
        raise ObjectDamaged(f"{FILE_NAMES} of a policy version is damaged: {error}") from error
