"""Taking a policy version out of the store: checked before, verified while and counted after."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.failures import WeightMismatch
from engines.models.adapters import adapted_weights, merge, whole_entries
from engines.models.tensor_files import CheckpointNames
from storage.objects.node_cache import NodeCache
from storage.objects.store import Store
from storage.runs.weights import (
    ALL,
    Adapter,
    BaseVersion,
    Manifest,
    Share,
    TensorEntry,
    TensorOutline,
    WeightsRef,
    adapter_digest,
    open_manifest,
    stream,
    wait_until_readable,
    weights_digest,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldVersion:
    """The policy version that an engine holds."""

    version: int
    digest: str  # of the bytes that were loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What a load of a policy version took."""

    held: HeldVersion
    tensors: int
    nbytes: int
    seconds: float  # reading and loading alone
    waited: float = 0.0  # of these, until the store had the version
    transferred: bool = False  # whether the tensors came from the trainer
    missed: str = ""  # why not, where they were offered


class IncomingWeights(ABC):
    """The tensors of a version on their way into a model; what passed is counted."""

    apart = False  # whether an adapter's factors are not merged into its base's tensors
    base = ""  # digest of the base below an adapter; empty where the version is none
    adapter: Adapter | None = None
    factors: Mapping[str, torch.Tensor] = {}

    @property
    @abstractmethod
    def tensors(self) -> int:
        """That came."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Of the tensors that came."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them, once."""

    @abstractmethod
    def is_copy(self, name: str) -> bool:
        """Whether another tensor of the version has the same bytes."""

    @abstractmethod
    def held(self) -> HeldVersion:
        """The version with the digest of the tensors that came, not of those that were meant to."""


class LoadedWeights(IncomingWeights):
    """The whole tensors of a version in the order of publication; each one read is verified.

    Several readers at once, such as the ranks that an engine is split over, may each verify a share:
    what they attest holds if all of them do. An adapter's factors are merged into its base's tensors
    on the way. Raises ObjectDamaged naming the tensor. What passed is counted.
    """

    def __init__(
        self,
        store: Store,
        weights: WeightsRef,
        cache: NodeCache | None = None,
        base_held: str = "",
        share: Share = ALL,
        apart_to_rank: int = 0,
    ) -> None:
        """`cache`: what this machine keeps of the store. `share`: which tensors this reader checks.

        apart_to_rank: an adapter of linear layers, of this rank or less, is not merged: the base's
        tensors are given as they are, and `factors` has the others once all have been taken.

        `base_held`: digest of the base whose other tensors the taker has already, if it has one: of
        an adapter on that base only the tensors that it changes are read and given.
        """
        self._store = store
        self._cache = cache
        self._weights, self._share = weights, share
        self._manifest = manifest = open_manifest(cache or store, weights)
        self._names: frozenset[str] | None = None
        self._factors = _Taken(manifest)
        self._whole = self._factors
        self.factors: dict[str, torch.Tensor] = {}  # of an adapter, by PEFT's names
        self.adapter = adapter = manifest.adapter
        self.apart = adapter is not None and not adapter.experts and adapter.rank <= apart_to_rank
        if manifest.adapter is not None and manifest.base is not None:
            base = open_manifest(cache or store, manifest.base)
            self.base = base.digest
            self._whole = _Taken(base)
            if base_held == self.base:
                self._names = frozenset(() if self.apart else adapted_weights(manifest))
                self._whole.had(base.tensors.keys() - self._names)

    @property
    def tensors(self) -> int:
        return sum(part.read for part in {self._whole, self._factors})

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in {self._whole, self._factors})

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        adapter, base = self._manifest.adapter, self._manifest.base
        if adapter is None or base is None:
            for name, tensor in self._stream(self._weights):
                yield name, tensor
                self._whole.take(name)
            return
        for name, factor in self._stream(self._weights):
            self.factors[name] = factor
            self._factors.take(name)
        for name, tensor in self._stream(base, self._names):
            yield name, tensor if self.apart else merge(name, tensor, self.factors, adapter)
            self._whole.take(name)

    def _stream(
        self, version: WeightsRef | BaseVersion, names: frozenset[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return stream(self._store, version, names, self._cache, self._share)

    def is_copy(self, name: str) -> bool:
        return self._whole.is_copy(name)

    def held(self) -> HeldVersion:
        adapter, digest = self._manifest.adapter, self._whole.digest()
        if adapter is not None:
            digest = adapter_digest(self._factors.digest(), adapter, digest)
        return HeldVersion(version=self._weights.version, digest=digest)


class _Taken:
    """Which tensors of a manifest have been taken."""

    def __init__(self, manifest: Manifest) -> None:
        self._entries = manifest.tensors
        self._names: list[str] = []
        self.read = 0
        self.nbytes = 0

    def had(self, names: Iterable[str]) -> None:
        """These were taken before."""
        self._names += names

    def take(self, name: str) -> None:
        """One more has been read and taken."""
        self._names.append(name)
        self.read += 1
        self.nbytes += self._entries[name].nbytes

    def is_copy(self, name: str) -> bool:
        """Whether another one has the same bytes."""
        digest = self._entries[name].digest
        return any(e.digest == digest for other, e in self._entries.items() if other != name)

    def digest(self) -> str:
        """Of those taken."""
        entries = ((name, self._entries[name]) for name in self._names)
        return weights_digest((name, e.dtype, e.shape, e.digest) for name, e in entries)


def check_manifest(
    store: Store,
    weights: WeightsRef,
    expected: Mapping[str, tuple[int, ...]],
    names: CheckpointNames,
    cache: NodeCache | None = None,
) -> float:
    """Raise WeightMismatch naming the first tensor that the version lacks or has otherwise.

    Done before anything is loaded: vLLM keeps the old values of a weight that does not come. Where
    machines keep versions it is waited for as `wait_until_readable` says; returns those seconds.
    expected: shapes by the model's names; names: what the version may call them instead.
    """
    waited = 0.0 if cache is None else wait_until_readable(store, weights, cache)
    check_shapes(weights, whole_entries(cache or store, weights), expected, names)
    return waited


def check_shapes(
    weights: WeightsRef,
    entries: Mapping[str, TensorEntry | TensorOutline],
    expected: Mapping[str, tuple[int, ...]],
    names: CheckpointNames,
) -> None:
    """The same of what a version is said to hold."""
    offered = {own: entries[name].shape for name, own in names.in_model(entries).items()}
    for name, shape in expected.items():
        if name not in offered:
            raise WeightMismatch(
                f"Policy version {weights.version} ({weights.key}) has no tensor {name}, which the "
                "rollout engine needs. Publish every weight, the output head also where it is tied."
            )
        if offered[name] != shape:
            raise WeightMismatch(
                f"Tensor {name} of policy version {weights.version} ({weights.key}) has shape "
                f"{offered[name]}, the rollout engine's model {shape}."
            )
    extra = sorted(set(offered) - set(expected))
    if extra:
        raise WeightMismatch(
            f"Policy version {weights.version} ({weights.key}) has a tensor {extra[0]} that the "
            "rollout engine's model has not."
        )
