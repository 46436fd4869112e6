"""What a train engine holds, as policy versions: published, digested, compared.

Whole weights; or, of an engine with adapters, the frozen base once and then their factors alone.
Every call is a collective of the ranks. Each whole tensor is on one rank at a time, which has a share
of the bytes. In a publication the ranks' shards take turns: while one rank gathers a shard, those
before it still write theirs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs.lora import LoraConfig
from configs.model import Model, PretrainedModel
from engines.failures import WeightMismatch
from engines.models.adapters import CONFIG_FILE, peft_config
from engines.models.checkpoints import companion_files
from engines.models.routers import find_experts
from engines.models.tensor_files import CheckpointNames
from engines.train.contract import TensorDifference, TrainSpec, WeightsComparison
from engines.train.model.fsdp import on_first, on_owners, own_part, share, spread, together
from engines.train.model.lora import (
    adapted_experts,
    adapted_layers,
    factors,
    take_factors,
)
from engines.train.model.master_weights import MasterWeights, base_weights
from engines.workers.device_memory import Lane, by_lanes, on_lanes
from storage.batches.tensors import bytes_of, dtype_of
from storage.objects.node_cache import Behind, NodeCache, open_behind
from storage.objects.store import Store
from storage.runs.adapters import base_key, find_base
from storage.runs.run_store import RunStore
from storage.runs.weights import (
    FILE_NAMES,
    Adapter,
    BaseTensors,
    BaseVersion,
    FileNames,
    TensorOutline,
    WeightFile,
    WeightsRef,
    adapter_digest,
    find_manifest,
    open_manifest,
    stream,
    tensor_digest,
    weights_digest,
)
from storage.runs.weights_writing import (
    SHARD_BYTES,
    Contents,
    announce,
    base_for,
    changes_name,
    contents,
    cut,
    finish,
    new_token,
    outline_of,
    same,
    shard_name,
    write_changes,
    write_shard,
)

LONE_BYTES = 64 * 2**20


def publish_together(
    store: Store,
    run: str,
    version: int,
    state: Mapping[str, Tensor],
    files: Mapping[str, bytes],
    dtype: torch.dtype | None,
    group: dist.ProcessGroup,
    every: int = 1,
    behind: Behind | None = None,
    shard_bytes: int = SHARD_BYTES,
    *,
    key: str | None = None,
    adapter: tuple[Adapter, BaseVersion] | None = None,
    unrounded: Collection[str] = (),
) -> Publication:
    """Write a (sharded) module's weights as a policy version, each rank some shards; a collective.

    The version has the same digest whatever the number of ranks; the rest is as `publish` promises.
    A rank holds the bytes of one shard at most beside the tensor that is gathered.

    every: of so many versions one is stored whole, the others as the difference from it; behind: by
    way of which whole ones go to the store, or to its disk: machines then have them before it, which
    has them once it is settled. What a machine keeps of the store is looked at first for that one.
    key: the folder, if not that of the version's number. adapter: what the tensors are factors of,
    and on which base.
    """
    key = key or RunStore(store, run).weights_key(version)
    outlines = outlines_of(state, dtype, unrounded)
    there, token = on_first(group, lambda: (find_manifest(store, key), new_token()))
    if there is not None:
        digest = digest_together(state, dtype, group, unrounded)
        if adapter is not None:
            digest = adapter_digest(digest, adapter[0], adapter[1].digest)
        return Publication(on_first(group, lambda: same(there, key, digest)))
    base = on_first(group, lambda: base_for(RunStore(store, run), version, outlines, every))
    shards = cut(outlines, group.size(), shard_bytes)
    owners = {name: number % group.size() for number, shard in enumerate(shards) for name in shard}
    parts_of = _Parts(store=store, key=key, token=token, base=base, behind=behind)
    device = _device(state)
    if group.size() == 1 and not store.backend.remote and by_lanes(device):
        numbered = {
            number: {name: outlines[name] for name in shard} for number, shard in enumerate(shards)
        }
        parts = [parts_of.write_by_lanes(numbered, state, device)]
    else:
        with _Writer(parts_of, shards, group.rank(), group.size(), outlines) as writer:
            on_owners(state, _formats(outlines), owners, group, writer.add)
            parts = together(group, writer.parts)
    parts_written = {number: part for rank in parts for number, part in rank.items()}
    ordered = [parts_written[number] for number in range(len(shards))]
    adapter_fields, below = (None, base) if adapter is None else adapter
    whole = contents(key, version, ordered, files, below, adapter_fields)
    if behind is None or below is not None:
        return Publication(on_first(group, lambda: finish(store, whole)))
    together(group, lambda: announce(behind, whole))
    return Publication(whole.ref, lambda: _settle(store, behind, whole, group))


@dataclass(frozen=True, slots=True)
class Publication:
    """A version that can be read: on its ranks' machines for now, or from the store."""

    ref: WeightsRef
    rest: Callable[[], WeightsRef] | None = None  # until the store has it; a collective

    def settle(self) -> WeightsRef:
        """Return once the store has it; a collective."""
        return self.ref if self.rest is None else self.rest()


def _settle(
    store: Store, behind: Behind, contents_written: Contents, group: dist.ProcessGroup
) -> WeightsRef:
    together(group, behind.settle)
    return on_first(group, lambda: finish(store, contents_written))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """Where the files of a publication go, and in what form."""

    store: Store
    key: str  # folder of the version
    token: str  # of the attempt
    base: BaseVersion | None  # from which the version is stored as the difference
    behind: Behind | None

    def write(
        self,
        shards: Mapping[int, Mapping[str, TensorOutline]],
        tensors: Callable[[int], Iterator[tuple[str, Tensor]]],
    ) -> dict[int, WeightFile]:
        """Write shards by number. `tensors` gives the next so many."""
        store, key = self.store, self.key
        if self.base is None:
            return {
                number: write_shard(
                    store,
                    key,
                    shard_name(number, self.token),
                    outlines,
                    tensors(len(outlines)),
                    self.behind,
                )
                for number, outlines in shards.items()
            }
        base = BaseTensors(store, self.base, None if self.behind is None else self.behind.cache)
        return {
            number: write_changes(
                store, key, changes_name(number, self.token), outlines, tensors(len(outlines)), base
            )
            for number, outlines in shards.items()
        }

    def write_by_lanes(
        self,
        shards: Mapping[int, Mapping[str, TensorOutline]],
        state: Mapping[str, Tensor],
        device: torch.device,
    ) -> dict[int, WeightFile]:
        """Write the shards of a lone rank, several at once, each on a lane of its device."""
        base = None if self.base is None else BaseTensors(self.store, self.base)
        local = {name: own_part(tensor)[0] for name, tensor in state.items()}

        def write(number: int, lane: Lane) -> WeightFile:
            outlines = shards[number]
            tensors = ((name, local[name]) for name in outlines)
            if base is None:
                name = shard_name(number, self.token)
                pieces = partial(_pieces, lane)
                return write_shard(
                    self.store, self.key, name, outlines, tensors, self.behind, pieces
                )
            name = changes_name(number, self.token)
            whole = ((each, _whole(lane, tensor, outlines[each])) for each, tensor in tensors)
            return write_changes(self.store, self.key, name, outlines, whole, base)

        parts = on_lanes(device, (partial(write, number) for number in shards))
        return dict(zip(shards, parts, strict=True))


def _pieces(lane: Lane, tensor: Tensor, outline: TensorOutline) -> Iterable[memoryview]:
    """The bytes of a tensor in the number format of its outline."""
    dtype = dtype_of(outline.dtype)
    if by_lanes(tensor.device):
        return lane.out(tensor, dtype)
    return [bytes_of(tensor.to(dtype)).data]


def _whole(lane: Lane, tensor: Tensor, outline: TensorOutline) -> Tensor:
    """The same as a tensor of the host."""
    tensor_whole, at = torch.empty(tensor.shape, dtype=dtype_of(outline.dtype)), 0
    target = tensor_whole.view(-1).view(torch.uint8).numpy()
    for piece in _pieces(lane, tensor, outline):
        target[at : at + piece.nbytes] = np.frombuffer(piece, np.uint8)
        at += piece.nbytes
    return tensor_whole


def _device(state: Mapping[str, Tensor]) -> torch.device:
    """The device of (sharded) weights; masters are on the host, and their modules' buffers not."""
    devices = {own_part(tensor)[0].device for tensor in state.values()}
    return next((device for device in devices if by_lanes(device)), torch.device("cpu"))


class _Writer:
    """Writes a rank's shards behind its back, one at a time, from the tensors that are added."""

    def __init__(
        self,
        parts: _Parts,
        shards: list[list[str]],
        rank: int,
        ranks: int,
        outlines: Mapping[str, TensorOutline],
    ) -> None:
        self._parts = parts
        numbers = range(rank, len(shards), ranks)
        self._shards = {
            number: {name: outlines[name] for name in shards[number]} for number in numbers
        }
        sizes = [sum(tensor.nbytes for tensor in shard.values()) for shard in self._shards.values()]
        # Bytes held. While others take their turn a whole shard waits; a lone rank writes as it goes.
        self._limit = max(sizes, default=0) if ranks > 1 else LONE_BYTES
        self._bytes_held = 0
        self._waiting: deque[tuple[str, Tensor]] = deque()
        self._changed = threading.Condition()
        self._over = False

    def __enter__(self) -> _Writer:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._written: Future[dict[int, WeightFile]] = self._pool.submit(self._write)
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._pool.shutdown()

    def add(self, name: str, tensor: Tensor) -> None:
        """Hand over the next tensor of this rank; waits while too much is held."""
        tensor = tensor.cpu()
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._written.done()
                    or not self._bytes_held
                    or self._bytes_held + tensor.nbytes <= self._limit
                )
            )
            if self._written.done():
                self._written.result()  # raises why
            self._waiting.append((name, tensor))
            self._bytes_held += tensor.nbytes
            self._changed.notify_all()

    def parts(self) -> dict[int, WeightFile]:
        """Number and file of every shard of this rank; waits until they are written."""
        return self._written.result()

    def _write(self) -> dict[int, WeightFile]:
        try:
            return self._parts.write(self._shards, self._next)
        finally:
            with self._changed:
                self._waiting.clear()
                self._bytes_held = 0
                self._changed.notify_all()

    def _next(self, count: int) -> Iterator[tuple[str, Tensor]]:
        for _ in range(count):
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._over)
                if not self._waiting:
                    raise RuntimeError("the publication was given up")
                name, tensor = self._waiting.popleft()
            yield name, tensor
            with self._changed:
                self._bytes_held -= tensor.nbytes
                self._changed.notify_all()


def outlines_of(
    state: Mapping[str, Tensor], dtype: torch.dtype | None, unrounded: Collection[str]
) -> dict[str, TensorOutline]:
    """Of tensors that are cast to `dtype`, but for those of these names."""
    return {
        name: outline_of(tensor, None if name in unrounded else dtype)
        for name, tensor in state.items()
    }


def _formats(outlines: Mapping[str, TensorOutline]) -> dict[str, torch.dtype]:
    return {name: dtype_of(outline.dtype) for name, outline in outlines.items()}


def digest_together(
    state: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    group: dist.ProcessGroup,
    unrounded: Collection[str] = (),
) -> str:
    """The digest that a version of these weights, cast to `dtype`, has; a collective.

    unrounded: see `publish_together`.
    """
    outlines = outlines_of(state, dtype, unrounded)
    owners = share(outlines, group.size())
    digests = on_owners(
        state, _formats(outlines), owners, group, lambda _, whole: tensor_digest(whole)
    )
    return weights_digest(
        (name, outline.dtype, outline.shape, digests[name]) for name, outline in outlines.items()
    )


def compare_together(
    store: Store,
    weights: WeightsRef | BaseVersion,
    state: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    group: dist.ProcessGroup,
    unrounded: Collection[str] = (),
) -> WeightsComparison:
    """A (sharded) module's weights, cast to `dtype`, beside a version's own bytes; a collective.

    Each tensor is read by the rank that has it whole. unrounded: see `publish_together`.
    """
    entries = on_first(group, lambda: open_manifest(store, weights).tensors)
    for (name, weight), (stored_name, stored) in zip(state.items(), entries.items(), strict=True):
        if name != stored_name or tuple(weight.shape) != stored.shape:
            raise WeightMismatch(
                f"{weights.key} has {stored_name} {stored.shape} where the model has "
                f"{name} {tuple(weight.shape)}. The run was made with another model."
            )
    owners = share(entries, group.size())
    stream_of_rank = stream(
        store, weights, {name for name in entries if owners[name] == group.rank()}
    )

    def beside(name: str, weight: Tensor) -> tuple[str, TensorDifference | None]:
        stored_name, stored = next(stream_of_rank)
        assert name == stored_name
        digest = tensor_digest(weight)
        if digest == entries[name].digest and weight.dtype == stored.dtype:
            return digest, None
        gap = (weight.detach().cpu().double() - stored.double()).abs()
        difference = TensorDifference(
            name=name,
            shape=tuple(weight.shape),
            elements=int((gap > 0).sum()),
            largest=float(gap.max()),
            total=float(gap.sum()),
        )
        return digest, difference

    outlines = outlines_of(state, dtype, unrounded)
    pairs = on_owners(state, _formats(outlines), owners, group, beside)
    return WeightsComparison(
        digest=weights_digest(
            (name, outline.dtype, outline.shape, pairs[name][0])
            for name, outline in outlines.items()
        ),
        tensors=len(pairs),
        differing=tuple(difference for _, difference in pairs.values() if difference is not None),
    )


@torch.no_grad()
def agree_together(
    store: Store, weights: WeightsRef, held: Mapping[str, Tensor], group: dist.ProcessGroup
) -> int:
    """Take a version's values where (sharded) weights, in its number formats, have others.

    A collective. held: by the version's names; what it has besides is not looked at. Returns how many
    tensors differed.
    """
    entries = on_first(group, lambda: open_manifest(store, weights).tensors)
    owners = share({name: entries[name] for name in held}, group.size())
    stream_of_rank = stream(store, weights, {name for name in held if owners[name] == group.rank()})
    differing = []
    for name in (each for each in entries if each in held):
        target = held[name]
        local, _ = own_part(target)
        before, dtype = local.clone(), dtype_of(entries[name].dtype)
        whole = next(stream_of_rank)[1] if owners[name] == group.rank() else None
        spread(target, whole, owners[name], group)
        same = before.to(dtype) == local.to(dtype)
        if not bool(same.all()):
            differing.append(name)
        local.copy_(torch.where(same, before, local))
    return len({name for names in together(group, lambda: differing) for name in names})


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
        unrounded: frozenset[str] = frozenset(),
    ) -> None:
        """`directory`: of the model's files; `names`: under which its weights are published.

        file_names: what the files call them that are published by other names. unrounded: names of
        tensors that are published in the number format in which they are held, whatever the others'.
        """
        self._module = module
        self._masters = masters
        self._names = names
        self._file_names = file_names
        self._unrounded = unrounded
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
        return state, outlines_of(state, dtype, self._unrounded)

    def leave(self, version: int, dtype: torch.dtype, key: str) -> WeightsRef:
        """Write the weights held, cast to `dtype`, to the store, into a folder of their own.

        For who computes with them and publishes nothing: tokenizer and settings are not beside them.
        """
        store, run = self._files.store, self._files.run
        weights_held, group = self._weights_held(dtype), self._group
        return publish_together(
            store, run, version, weights_held, {}, dtype, group, key=key, unrounded=self._unrounded
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
        return digest_together(self._weights(dtype), dtype, self._group, self._unrounded)

    def compare(self, weights: WeightsRef, dtype: torch.dtype) -> WeightsComparison:
        """The weights held, cast to `dtype`, beside a published version's."""
        weights_held, group = self._weights(dtype), self._group
        return compare_together(
            self._files.store, weights, weights_held, dtype, group, self._unrounded
        )

    def agree(self, weights: WeightsRef) -> int:
        """Take a version's weights where those held are others; how many tensors differed."""
        targets = self._names.renamed(base_weights(self._module, self._masters, to_set=True))
        return agree_together(self._files.store, weights, targets, self._group)

    def _weights(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """What a version is made of: what is held, and what the checkpoint holds besides."""
        return self._names.to_files(self._weights_held(dtype))

    def _weights_held(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
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
            unrounded=self._unrounded,
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
