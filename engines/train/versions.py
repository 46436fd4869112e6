"""What a train engine holds, as policy versions: published, digested, compared.

Whole weights; or, of an engine with adapters, the frozen base once and then their factors alone.
Every call is a collective.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs.lora import LoraConfig
from configs.model import Model, PretrainedModel
from engines.failures import WeightMismatch
from engines.models.adapters import CONFIG_FILE, peft_config
from engines.models.checkpoints import companion_files
from engines.models.tensor_files import CheckpointNames
from engines.train.model.expert_parallel import find_experts
from engines.train.model.gathering import on_first
from engines.train.model.lora import (
    adapted_experts,
    adapted_layers,
    base_weights,
    factors,
    take_factors,
)
from engines.train.model.master_weights import MasterWeights
from engines.train.publication import (
    Publication,
    agree_together,
    compare_together,
    digest_together,
    outlines_of,
    publish_together,
)
from engines.train.spec import TrainSpec, WeightsComparison
from storage.objects.node_cache import NodeCache, open_behind
from storage.runs.adapters import base_key, find_base
from storage.runs.run_store import RunStore
from storage.runs.weights import (
    FILE_NAMES,
    Adapter,
    BaseVersion,
    FileNames,
    TensorOutline,
    WeightsRef,
    adapter_digest,
    open_manifest,
)


class Versions:
    """Versions of all weights of a sharded module."""

    def __init__(
        self,
        module: nn.Module,
        spec: TrainSpec,
        files: RunStore,
        directory: Path,
        cache: NodeCache | None,
        group: dist.ProcessGroup,
        masters: MasterWeights,
        names: CheckpointNames,
        file_names: FileNames,
        kept: frozenset[str] = frozenset(),
    ) -> None:
        """`directory`: of the model's files; `names`: under which its weights are published.

        file_names: what the files call them that are published by other names. kept: names of tensors
        that are published in the number format in which they are held, whatever the others' is.
        """
        self._module = module
        self._masters = masters
        self._names = names
        self._file_names = file_names
        self._kept = kept
        self._spec = spec
        self._files = files
        self._directory = directory
        self._behind = open_behind(files.store, cache)
        self._group = group
        self._last: Publication | None = None

    def publish(self, version: int, dtype: torch.dtype, whole: bool) -> WeightsRef:
        """Publish the weights held, cast to `dtype`, as a policy version.

        The machines of the ranks may have it before the store: `settle` waits for that. Unless
        `whole` some versions are stored as the difference from another one, if the settings say so.
        """
        if self._behind is not None:
            self._behind.abandon()  # of an attempt that failed
        self._last = self._begin(version, dtype, whole)
        return self._last.ref

    def settle(self, version: int, dtype: torch.dtype, whole: bool) -> WeightsRef:
        """Return once the store has the version; what was not published here is published now."""
        if self._last is None or self._last.ref.version != version:
            self.publish(version, dtype, whole)
        assert self._last is not None
        return self._last.settle()

    def whole(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, TensorOutline]]:
        """What `publish` gives a version, as it is held here, and what it will be cast to `dtype`."""
        state = self._weights(dtype)
        return state, outlines_of(state, dtype, self._kept)

    def leave(self, version: int, dtype: torch.dtype, key: str) -> WeightsRef:
        """Write the weights held, cast to `dtype`, to the store, into a folder of their own.

        For who computes with them and publishes nothing: tokenizer and settings are not beside them.
        """
        store, run = self._files.store, self._files.run
        weights_held, group = self._held(dtype), self._group
        return publish_together(
            store, run, version, weights_held, {}, dtype, group, key=key, kept=self._kept
        ).settle()

    def close(self) -> None:
        """Give up what is on its way to the store."""
        if self._behind is not None:
            self._behind.abandon()

    def _begin(self, version: int, dtype: torch.dtype, whole: bool) -> Publication:
        # A step changes nearly every float32: there is no difference worth storing.
        every = 1 if whole or dtype == torch.float32 else self._spec.whole_every
        return self._publish_whole(version, dtype, every)

    def digest(self, dtype: torch.dtype | None) -> str:
        """What `publish` would give the version's digest; None: of the weights as they are."""
        return digest_together(self._weights(dtype), dtype, self._group, self._kept)

    def compare(self, weights: WeightsRef, dtype: torch.dtype) -> WeightsComparison:
        """The weights held, cast to `dtype`, beside a published version's."""
        weights_held, group = self._weights(dtype), self._group
        return compare_together(self._files.store, weights, weights_held, dtype, group, self._kept)

    def agree(self, weights: WeightsRef) -> int:
        """Take a version's weights where those held are others; how many tensors differed."""
        targets = self._names.renamed(base_weights(self._module, self._masters, to_set=True))
        return agree_together(self._files.store, weights, targets, self._group)

    def _weights(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """What a version is made of: what is held, and what the checkpoint holds besides."""
        return self._names.to_files(self._held(dtype))

    def _held(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """What is held, to be cast to `dtype`: masters, unless the device has their rounding."""
        rounded = dtype == torch.bfloat16
        return base_weights(self._module, None if rounded else self._masters)

    def _companions(self) -> dict[str, bytes]:
        """What lies beside a version's tensors."""
        files = companion_files(self._directory)
        if self._file_names:
            files[FILE_NAMES] = self._file_names.model_dump_json().encode()
        return files

    def _publish_whole(
        self, version: int, dtype: torch.dtype, every: int = 1, key: str | None = None
    ) -> Publication:
        return publish_together(
            self._files.store,
            self._files.run,
            version,
            self._weights(dtype),
            self._companions(),
            dtype,
            self._group,
            every=every,
            behind=self._behind,
            key=key,
            kept=self._kept,
        )


class AdapterVersions(Versions):
    """Versions of a language model's adapters, on a base that does not change."""

    def _begin(self, version: int, dtype: torch.dtype, whole: bool) -> Publication:
        """Publish the factors, in float32, as a version; before the first one the base in `dtype`.

        Raises WeightMismatch where the base in the store is not the one that is held here.
        """
        base = self._published_base(dtype)
        modules = [name for name, _ in adapted_layers(self._module)]
        adapter, mixture = self._adapter, bool(find_experts(self._module))
        config = peft_config(
            self._lora, modules, adapter.experts, mixture, _loadable(self._spec.model)
        )
        return publish_together(
            self._files.store,
            self._files.run,
            version,
            factors(self._module),
            {CONFIG_FILE: config},
            None,
            self._group,
            adapter=(adapter, base),
        )

    def whole(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, TensorOutline]]:
        raise ValueError(
            "The factors of an adapter are read from the store. Set rollout.weight_transfer = store."
        )

    def digest(self, dtype: torch.dtype | None) -> str:
        """What `publish` would give the version's digest."""
        factors_digest = digest_together(factors(self._module), None, self._group)
        return adapter_digest(factors_digest, self._adapter, self._base_digest(dtype))

    def compare(self, weights: WeightsRef, dtype: torch.dtype) -> WeightsComparison:
        """Base and factors held beside a published version's."""
        store, group = self._files.store, self._group
        published = on_first(group, lambda: open_manifest(store, weights).base)
        if published is None:
            raise WeightMismatch(
                f"{weights.key} is no adapter, and this run trains one. Set lora = null."
            )
        base = compare_together(store, published, self._weights(dtype), dtype, group)
        factors_compared = compare_together(store, weights, factors(self._module), None, group)
        return replace(
            factors_compared,
            digest=adapter_digest(factors_compared.digest, self._adapter, base.digest),
            tensors=base.tensors + factors_compared.tensors,
            differing=base.differing + factors_compared.differing,
        )

    def agree(self, weights: WeightsRef) -> int:
        targets = factors(self._module)
        differing = agree_together(self._files.store, weights, targets, self._group)
        take_factors(self._module, targets)
        return differing

    @cached_property
    def _base_digests(self) -> dict[torch.dtype | None, str]:
        """Of the base held, by the number format that it is cast to; it never changes."""
        return {}

    @property
    def _lora(self) -> LoraConfig:
        assert self._spec.lora is not None
        return self._spec.lora

    @property
    def _adapter(self) -> Adapter:
        experts = tuple(adapted_experts(self._module).values())
        return Adapter(rank=self._lora.rank, alpha=self._lora.alpha, experts=experts)

    def _base_digest(self, dtype: torch.dtype | None) -> str:
        if dtype not in self._base_digests:
            self._base_digests[dtype] = digest_together(self._weights(dtype), dtype, self._group)
        return self._base_digests[dtype]

    def _published_base(self, dtype: torch.dtype) -> BaseVersion:
        """The base in the store, put there unless it is; it must be the one that is held."""
        name = str(dtype).removeprefix("torch.")
        base = on_first(self._group, lambda: find_base(self._files, name))
        if base is None:
            published = self._publish_whole(0, dtype, key=base_key(self._files, name)).settle()
            base = BaseVersion(key=published.key, digest=published.digest)
            self._base_digests[dtype] = base.digest
        if self._base_digest(dtype) != base.digest:
            raise WeightMismatch(
                f"The adapters of run {self._files.run} are on the base {base.key} with digest "
                f"{base.digest}, and the model loaded here has {self._base_digest(dtype)}. "
                "Set model to what it was, and model.revision where its hub repository has moved on."
            )
        return base


def _loadable(model: Model) -> PretrainedModel | None:
    """The model, where others can load it by its name."""
    if isinstance(model, PretrainedModel) and not model.path.endswith(".gguf"):
        return model
    return None
