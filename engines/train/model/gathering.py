"""Whole tensors of a sharded module, each on one rank that does something with it.

A tensor's bytes go to that rank alone. What the ranks found is exchanged at the end, errors too: a
rank that failed goes on taking part in the gathers, for the others would wait for it, and then all
raise what the first of them met.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from engines.train.model.fsdp import own_part

T = TypeVar("T")


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
