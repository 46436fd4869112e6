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
    mine: dict[str, T] = {}
    failed: Exception | None = None
    for name, tensor in state.items():
        whole = gather(tensor, formats[name], owners[name], group)
        if whole is not None and failed is None:
            try:
                mine[name] = work(name, whole)
            except Exception as error:  # raised below, on every rank
                failed = error
        del whole
    found = {name: one for part in _exchange(mine, failed, group) for name, one in part.items()}
    return {name: found[name] for name in state}


def gather(
    value: Tensor, dtype: torch.dtype | None, owner: int, group: dist.ProcessGroup
) -> Tensor | None:
    """The whole of a (sharded) tensor on rank `owner`, None on the others; a collective.

    What is not sharded, and all on a lone rank, may be the module's own memory.
    """
    own, _ = own_part(value)
    if dtype is not None and own.is_floating_point():
        own = own.to(dtype)
    across = value.device_mesh.ndim - 1 if isinstance(value, DTensor) else 0
    shards = value.device_mesh.size(across) if isinstance(value, DTensor) else 1
    if not isinstance(value, DTensor) or shards == 1:
        return own if owner == group.rank() else None
    copy, place = divmod(owner, shards)
    if group.rank() // shards != copy:
        return None
    own = own.to(value.device_mesh.device_type)  # a master is in the host's memory
    # Of several copies that one takes part in which the owner is.
    ranks = value.device_mesh.get_group(across)
    rows = -(-len(value) // shards)
    if lack := rows - len(own):
        own = torch.cat([own, own.new_zeros(lack, *own.shape[1:])])
    if owner != group.rank():
        dist.gather(own.contiguous(), group=ranks, group_dst=place)
        return None
    whole = own.new_empty(rows * shards, *own.shape[1:])
    dist.gather(own.contiguous(), list(whole.split(rows)), group=ranks, group_dst=place)
    return whole[: len(value)]


def together(group: dist.ProcessGroup, work: Callable[[], T]) -> list[T]:
    """What `work` gives on each rank, in rank order; the first rank's error on every one."""
    try:
        mine, failed = [work()], None
    except Exception as error:  # raised below, on every rank
        mine, failed = [], error
    return [one for part in _exchange(mine, failed, group) for one in part]


def on_first(group: dist.ProcessGroup, work: Callable[[], T]) -> T:
    """What `work` gives on rank 0, on every rank; so is its error."""
    return together(group, lambda: work() if group.rank() == 0 else None)[0]  # type: ignore[return-value]


def _exchange(mine: T, failed: Exception | None, group: dist.ProcessGroup) -> list[T]:
    """Every rank's part, in rank order. Raises the first rank's error."""
    if group.size() == 1:  # gloo's threads would get teams of OpenMP threads for it, which stay
        if failed is not None:
            raise failed
        return [mine]
    parts: list[tuple[T, Exception | None]] = [(mine, None)] * group.size()
    dist.all_gather_object(parts, (mine, failed), group=group)
    for _, error in parts:
        if error is not None:
            raise error if failed is None else failed
    return [part for part, _ in parts]
