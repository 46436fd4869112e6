"""Policy versions: safetensors shards that transformers and vLLM load as they are, and a manifest.

`weights/v000012/` holds model-0000i-<token>.safetensors, model.safetensors.index.json, the files
given (config.json, the tokenizer's), and manifest.json, which is written last: a version without a
manifest does not exist. Written by weights_writing.py, read by weights_reading.py.

A manifest may name a base: another version, without which this one cannot be read. Retention, forks
and the audit keep to that whatever it is made of. A version that is stored as the difference from its
base has changes-0000i-<token>.delta and the manifest alone. The tensors of an adapter are factors
that are merged into its base's (adapters.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from storage.batches import tensors as torch_bytes
from storage.batches.format import DTYPES
from storage.objects import documents
from storage.objects.backends import StoredKey
from storage.objects.documents import digest, digest_lines
from storage.objects.errors import ObjectDamaged, ObjectMissing
from storage.objects.node_cache import announced

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


class Frozen(BaseModel):
    """A record that is read back from a store; fields of later versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class BaseVersion(Frozen):
    """The version without which another one cannot be read."""

    key: StoredKey  # folder, relative to the store
    digest: str  # of its tensors


class WeightsRef(Frozen):
    """A handle to a policy version: small, JSON by `model_dump`."""

    version: int
    key: StoredKey  # folder, relative to the store
    digest: str  # of the tensors: names, types, shapes, bytes (see `weights_digest`)
    nbytes: int  # of the tensors
    base: BaseVersion | None = None  # None: the version is whole
    stored: int | None = None  # bytes of its files; None: this was not yet said when it was made


class StackedWeight(Frozen):
    """A weight that has those of all experts of a layer, one after the other."""

    name: str
    transposed: bool  # [experts, in, out], not [experts, out, in]


class Adapter(Frozen):
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


class TensorEntry(Frozen):
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
        wanted = {"whole": self.nbytes, "same": 0, "changed": max(size, 0)}[self.form]
        if self.start < 0 or size != wanted:
            raise ValueError(f"it takes the bytes {self.start} to {self.stop} and needs {wanted}")
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


class FileEntry(Frozen):
    nbytes: int = Field(ge=0)
    digest: str


class Manifest(Frozen):
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
        found = weights_digest(entries)
        if self.adapter is None or self.base is None:
            return found
        return adapter_digest(found, self.adapter, self.base.digest)


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
    experts = [[one.name, one.transposed] for one in adapter.experts]
    return digest_lines([[factors, adapter.rank, adapter.alpha, base, *experts]])


def open_manifest_at(store: Store | NodeCache, key: str) -> Manifest:
    """The manifest in the folder `key`. Raises ObjectMissing, ObjectDamaged."""
    manifest = f"{key}/{MANIFEST}"
    body = documents.decode_version(READERS, manifest, store.read(manifest))
    return documents.validated(Manifest, manifest, body)


def open_manifest(store: Store | NodeCache, ref: WeightsRef | BaseVersion) -> Manifest:
    """The manifest of the version that `ref` means. Raises ObjectMissing, ObjectDamaged.

    That of a local store may still be on its way to the disk.
    """
    try:
        manifest = open_manifest_at(store, ref.key)
    except ObjectMissing:
        manifest = _announced(store, ref.key)
    found = manifest.content
    if not manifest.digest == ref.digest == found:
        raise ObjectDamaged(
            f"Object {ref.key}/{MANIFEST} is not the version that the reference names: "
            f"its tensors have digest {found}, the reference says {ref.digest}."
        )
    return manifest


def _announced(store: Store | NodeCache, key: str) -> Manifest:
    manifest = f"{key}/{MANIFEST}"
    try:
        data = store.read(announced(manifest))
    except ObjectMissing:  # the store has it by now, or never
        data = store.read(manifest)
    return documents.validated(
        Manifest, manifest, documents.decode_version(READERS, manifest, data)
    )


def open_chain(
    store: Store | NodeCache, ref: WeightsRef | BaseVersion
) -> list[tuple[str, Manifest]]:
    """Folder and manifest of a version, of its base, of that one's base, and so on.

    All that must be there for the version to be read. Raises ObjectMissing, ObjectDamaged.
    """
    found: list[tuple[str, Manifest]] = []
    wanted: WeightsRef | BaseVersion | None = ref
    while wanted is not None:
        if any(key == wanted.key for key, _ in found):
            raise ObjectDamaged(
                f"Object {wanted.key}/{MANIFEST} is, by way of others, its own base."
            )
        found.append((wanted.key, open_manifest(store, wanted)))
        wanted = found[-1][1].base
    return found


def find_manifest(store: Store, key: str) -> Manifest | None:
    """The manifest in the folder `key`, if a version was finished there."""
    try:
        return open_manifest_at(store, key)
    except ObjectMissing:
        return None
