"""Taking a policy version out of the store: checked before, verified while and counted after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.failures import WeightMismatch
from storage.objects.node_cache import NodeCache
from storage.objects.store import Store
from storage.runs.weights import TensorEntry, WeightsRef, open_manifest, weights_digest
from storage.runs.weights_reading import stream

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """The policy version that an engine holds."""

    version: int
    digest: str  # of the bytes that were loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What a load of a policy version took."""

    held: Held
    tensors: int
    nbytes: int
    seconds: float  # reading and loading alone


class LoadedWeights:
    """The tensors of a version in the order in which they were published; each one is verified.

    Raises ObjectDamaged naming the tensor. What passed is counted.
    """

    def __init__(self, store: Store, weights: WeightsRef, cache: NodeCache | None = None) -> None:
        """`cache`: what this machine keeps of the store."""
        self._store = store
        self._cache = cache
        self._weights = weights
        self._passed: dict[str, TensorEntry] = {}
        self.nbytes = 0

    @property
    def tensors(self) -> int:
        return len(self._passed)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        entries = open_manifest(self._store, self._weights).tensors
        for name, tensor in stream(self._store, self._weights, cache=self._cache):
            yield name, tensor
            self._passed[name] = entries[name]
            self.nbytes += tensor.nbytes

    def held(self) -> Held:
        """The version with the digest of the tensors that were taken, not of those offered."""
        taken = ((name, e.dtype, e.shape, e.digest) for name, e in self._passed.items())
        return Held(version=self._weights.version, digest=weights_digest(taken))


def check_manifest(
    store: Store, weights: WeightsRef, expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise WeightMismatch naming the first tensor that the version lacks or has otherwise.

    Done before anything is loaded: vLLM keeps the old values of a weight that does not come.
    """
    offered = {name: entry.shape for name, entry in open_manifest(store, weights).tensors.items()}
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
