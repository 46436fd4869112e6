"""FSDP2: a model spread over the ranks of a gang, one unit per layer of decoder and vision towers.

A mixture's experts are a unit of their own in each layer: they are most of it, and are gathered
after what stands before them has been computed.

Here it is sharded, and set to a published policy version, and its whole tensors are gathered, each on
one rank that does something with it. What the ranks found is exchanged at the end, errors too: a rank
that failed goes on taking part in the gathers, for the others would wait for it, and then all raise
what the first of them met.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from engines.failures import WeightMismatch
from engines.models.adapters import stream_whole, whole_entries
from engines.models.routers import find_experts
from engines.models.tensor_files import CheckpointNames
from engines.models.vla.openvla import VisionBackbone
from engines.start_progress import report
from storage.objects.store import Store
from storage.runs.weights import WeightsRef

T = TypeVar("T")


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


def shard(
    module: nn.Module,
    group: dist.ProcessGroup,
    device: torch.device,
    compute: torch.dtype,
    reshard: bool | Literal["auto"] = "auto",
    replicas: int = 1,
    experts: Sequence[nn.Module] = (),
    timeout: float | None = None,
) -> None:
    """Shard a module that holds a language model over a group, in place; its values are not set.

    Args:
        module: A policy or a critic on the meta device; weights stay in the format they have, sums
            of gradients in float32. Of each weight the rank gets memory for its rows alone.
        group: All ranks.
        device: This rank's.
        compute: In what a layer's weights are gathered and multiplied.
        reshard: Whether a layer's gathered weights are let go between forward and backward pass;
            auto: unless its shard is the whole, where there is nothing to save.
        replicas: Copies of the model, each sharded over as many neighbouring ranks.
        experts: Of layers, which are not gathered (expert_parallel.py).
        timeout: Seconds that a collective of the ranks of a copy may take; None: torch's own limit.
    """
    mesh = _mesh(group, device.type, replicas, timeout)
    precision = MixedPrecisionPolicy()
    if compute != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    again = group.size() > replicas if reshard == "auto" else reshard
    if experts:
        from engines.train.model.expert_parallel import spread_experts
    for module_of_experts in experts:
        spread_experts(module_of_experts, mesh, compute)
    wrap = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=precision,
        ignored_params={
            weight for module_of_experts in experts for weight in module_of_experts.parameters()
        },
    )
    # Gates come in float32 where routers compute so, and stay what they are.
    as_given = replace(precision, cast_forward_inputs=False)
    for module_of_experts in find_experts(module):
        if module_of_experts not in experts:
            wrap(module_of_experts, mp_policy=as_given, reshard_after_forward=again)
    for layer in (*layers(module), *tower_layers(module)):
        wrap(layer, reshard_after_forward=again)
    wrap(module, reshard_after_forward=False)
    module.to_empty(device=device)


@functools.lru_cache(maxsize=8)  # roles that share a process share its groups
def _mesh(
    group: dist.ProcessGroup, device: str, replicas: int, timeout: float | None
) -> DeviceMesh:
    """The ranks in a row, or with several replicas as a table [replicas, ranks of each]."""
    if replicas == 1:
        return DeviceMesh.from_group(group, device)
    table = torch.arange(group.size()).view(replicas, -1)
    replica, place = divmod(group.rank(), table.shape[1])
    # Every rank makes every group, in the same order.
    limit = None if timeout is None else timedelta(seconds=timeout)
    copies = [dist.new_group(column, timeout=limit) for column in table.t().tolist()]
    shards = [dist.new_group(row, timeout=limit) for row in table.tolist()]
    groups = [copies[place], shards[replica]]
    return DeviceMesh.from_group(groups, device, mesh=table, mesh_dim_names=("replicate", "shard"))


def layers(module: nn.Module) -> list[nn.Module]:
    """The decoder's repeated layers: the largest list of modules in it."""
    seeing = {id(part) for tower in _towers(module) for part in tower.modules()}
    lists = [
        part
        for part in module.modules()
        if isinstance(part, nn.ModuleList) and id(part) not in seeing
    ]
    if not lists:
        raise ValueError(
            f"{type(module).__name__} has no list of layers to shard. Choose another model."
        )
    sizes = [
        sum(parameter.numel() for parameter in module_list.parameters()) for module_list in lists
    ]
    return list(lists[sizes.index(max(sizes))])


def tower_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of the vision towers; none where the policy looks at no images."""
    return [layer for towers in _towers(module) for layer in towers.blocks]


def _towers(module: nn.Module) -> list[VisionBackbone]:
    return [part for part in module.modules() if isinstance(part, VisionBackbone)]


def own_part(target: Tensor) -> tuple[Tensor, int]:
    """This rank's rows of a (sharded) weight, and how many elements of the whole stand before them.

    The last ranks of many may have none. What is not sharded is every rank's.
    """
    if not isinstance(target, DTensor):
        return target.detach(), 0
    *copied, sharded = target.placements
    assert sharded == Shard(0), f"FSDP shards rows, here it was {target.placements}"
    assert all(placement == Replicate() for placement in copied), target.placements
    mesh = target.device_mesh
    with torch.no_grad():
        local = target.to_local().detach()
    rows, first = Shard.local_shard_size_and_offset(
        len(target), mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    )
    assert rows == len(local)
    return local, first * math.prod(target.shape[1:])


def spread(target: Tensor, whole: Tensor | None, source: int, group: dist.ProcessGroup) -> None:
    """Copy a whole tensor of one rank into a (sharded) weight; a collective.

    Args:
        target: Changed in place; each rank gets its rows alone.
        whole: Of the target's shape and of any number format on rank `source`; else None.
        source: A rank of the group.
        group: All ranks.
    """
    local, _ = own_part(target)
    # A master is in the host's memory, and what the group exchanges on its device.
    device = target.device_mesh.device_type if isinstance(target, DTensor) else local.device
    if whole is not None:
        whole = whole.to(device, local.dtype)
    if not isinstance(target, DTensor):
        received = local if whole is None else whole.contiguous()
        dist.broadcast(received, group=group, group_src=source)
    else:
        shards = target.device_mesh.size(target.device_mesh.ndim - 1)
        rows = -(-len(target) // shards)
        received = local.new_empty(rows, *local.shape[1:], device=device)
        parts = None
        if whole is not None:  # rank r has the shard r modulo `shards`, whichever copy it is in
            parts = _equal_parts(whole, rows, shards) * (group.size() // shards)
        dist.scatter(received, parts, group=group, group_src=source)
    local.copy_(received[: len(local)] if local.dim() else received)


def _equal_parts(whole: Tensor, rows: int, number: int) -> list[Tensor]:
    """So many parts of so many rows each; what the tensor lacks for that is zeros at its end."""
    parts = list(whole.split(rows))
    while len(parts) < number:
        parts.append(whole[:0])
    missing = [rows - len(part) for part in parts]
    return [
        part if not lack else torch.cat([part, part.new_zeros(lack, *part.shape[1:])])
        for part, lack in zip(parts, missing, strict=True)
    ]


def fill(
    held: Mapping[str, Tensor],
    store: Store,
    weights: WeightsRef,
    group: dist.ProcessGroup,
    names: CheckpointNames,
) -> None:
    """Copy a version's whole tensors into a model's (sharded) ones of the same names; a collective.

    Those of an adapter are merged with its base's. names: what the version may call them instead.

    Each tensor is read by one rank, which checks its digest and gives the others their rows, so
    the ranks together read every byte once, and no byte is used that was not checked.

    Raises WeightMismatch naming a tensor that one of the two lacks or has in another shape, before
    anything is copied. A rank that finds one damaged raises ObjectDamaged.
    """
    entries = whole_entries(store, weights)
    names_of_model = names.in_model(entries)
    for name, place in names_of_model.items():
        if place not in held or tuple(held[place].shape) != entries[name].shape:
            has = tuple(held[place].shape) if place in held else "no such tensor"
            raise WeightMismatch(
                f"Tensor {name} of {weights.key} has shape {entries[name].shape}, the model has "
                f"{has}. Set model to the one that these weights were trained from."
            )
    if missing := held.keys() - set(names_of_model.values()):
        raise WeightMismatch(
            f"{weights.key} has no tensor {min(missing)}, which the model needs. "
            "Set model to the one that these weights were trained from."
        )
    readers = share({name: entries[name] for name in names_of_model}, group.size())
    stream_of_rank = stream_whole(
        store, weights, {name for name in names_of_model if readers[name] == group.rank()}
    )
    for number, (name, place) in enumerate(names_of_model.items()):
        report(f"reading {weights.key}: {number} of {len(names_of_model)} tensors")
        whole = next(stream_of_rank)[1] if readers[name] == group.rank() else None
        spread(held[place], whole, readers[name], group)


def share(entries: Mapping[str, _Sized], ranks: int) -> dict[str, int]:
    """Which rank takes each tensor: the one that has taken the fewest bytes until then."""
    owners = {}
    loads = [0] * ranks
    for name, entry in entries.items():
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += entry.nbytes
    return owners


def on_owners(
    state: Mapping[str, Tensor],
    formats: Mapping[str, torch.dtype],
    owners: Mapping[str, int],
    group: dist.ProcessGroup,
    work: Callable[[str, Tensor], T],
) -> dict[str, T]:
    """What `work` makes of each whole tensor on the rank that owns it; a collective.

    Args:
        state: Of the (sharded) module; its order is that of the gathers and of the result.
        formats: What each is cast to before it is gathered.
        owners: A rank of the group for each tensor.
        group: All ranks. Each gets the same result.
    """
    results: dict[str, T] = {}
    failed: Exception | None = None
    for name, tensor in state.items():
        whole = gather(tensor, formats[name], owners[name], group)
        if whole is not None and failed is None:
            try:
                results[name] = work(name, whole)
            except Exception as error:  # raised below, on every rank
                failed = error
        del whole
    merged = {
        name: result for part in _exchange(results, failed, group) for name, result in part.items()
    }
    return {name: merged[name] for name in state}


def gather(
    value: Tensor, dtype: torch.dtype | None, owner: int, group: dist.ProcessGroup
) -> Tensor | None:
    """The whole of a (sharded) tensor on rank `owner`, None on the others; a collective.

    What is not sharded, and all on a lone rank, may be the module's own memory.
    """
    local, _ = own_part(value)
    if dtype is not None and local.is_floating_point():
        local = local.to(dtype)
    across = value.device_mesh.ndim - 1 if isinstance(value, DTensor) else 0
    shards = value.device_mesh.size(across) if isinstance(value, DTensor) else 1
    if not isinstance(value, DTensor) or shards == 1:
        return local if owner == group.rank() else None
    copy, place = divmod(owner, shards)
    if group.rank() // shards != copy:
        return None
    local = local.to(value.device_mesh.device_type)  # a master is in the host's memory
    # Of several copies that one takes part in which the owner is.
    ranks = value.device_mesh.get_group(across)
    rows = -(-len(value) // shards)
    if lack := rows - len(local):
        local = torch.cat([local, local.new_zeros(lack, *local.shape[1:])])
    if owner != group.rank():
        dist.gather(local.contiguous(), group=ranks, group_dst=place)
        return None
    whole = local.new_empty(rows * shards, *local.shape[1:])
    dist.gather(local.contiguous(), list(whole.split(rows)), group=ranks, group_dst=place)
    return whole[: len(value)]


def together(group: dist.ProcessGroup, work: Callable[[], T]) -> list[T]:
    """What `work` gives on each rank, in rank order; the first rank's error on every one."""
    try:
        values, failed = [work()], None
    except Exception as error:  # raised below, on every rank
        values, failed = [], error
    return [value for part in _exchange(values, failed, group) for value in part]


def on_first(group: dist.ProcessGroup, work: Callable[[], T]) -> T:
    """What `work` gives on rank 0, on every rank; so is its error."""
    return together(group, lambda: work() if group.rank() == 0 else None)[0]  # type: ignore[return-value]


def _exchange(value: T, failed: Exception | None, group: dist.ProcessGroup) -> list[T]:
    """Every rank's part, in rank order. Raises the first rank's error."""
    if group.size() == 1:  # gloo's threads would get teams of OpenMP threads for it, which stay
        if failed is not None:
            raise failed
        return [value]
    parts: list[tuple[T, Exception | None]] = [(value, None)] * group.size()
    dist.all_gather_object(parts, (value, failed), group=group)
    for _, error in parts:
        if error is not None:
            raise error if failed is None else failed
    return [part for part, _ in parts]
