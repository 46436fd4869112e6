"""Experts of a mixture on the ranks that share a copy of the model, each with its own; tokens travel.

Of n ranks, rank r has the experts r E / n … of E: the rows that FSDP would give it, so that files,
versions and snapshots are the same. They are not gathered: the states of tokens go to the ranks of
the experts that routers chose, and what these make of them comes back, where gates weigh and add it.
Why so is in docs/decisions/expert-parallel.md.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import functional_call
from torch.nn.functional import pad

from engines.models.routers import count_experts


def check_experts(experts: tuple[nn.Module, ...], size: int, shards: int, role: str) -> None:
    """Raise ValueError in a sentence where experts cannot be spread over so many ranks.

    Args:
        experts: Of a model.
        size: train.expert_parallel, above 1.
        shards: Ranks that share a copy of the model.
        role: Whose model it is.
    """
    if size != shards:
        raise ValueError(
            f"train.expert_parallel = {size} is not the number of ranks that share a copy of the "
            f"model of role {role}, workers / train.replicas = {shards}. Set it to {shards}"
            f"{', or to 1' if shards > 1 else ''}."
        )
    for number in {count_experts(module) for module in experts}:
        if number % size:
            raise ValueError(
                f"train.expert_parallel = {size} does not divide the {number} experts of the model "
                f"of role {role}. Set it to 1, or train.replicas so that workers / train.replicas "
                "divides them."
            )


def spread_experts(experts: nn.Module, mesh: DeviceMesh, compute: torch.dtype) -> None:
    """Give a rank its experts of a layer alone, in place; what is computed stays the same.

    Args:
        experts: On the meta device.
        mesh: The ranks, as FSDP has them: the last dimension shares a copy.
        compute: In what their weights are multiplied.
    """
    shards = mesh.size(mesh.ndim - 1)
    spread_module = copy.deepcopy(experts)
    spread_module.num_experts = count_experts(experts) // shards  # type: ignore[assignment]
    placements = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
    for name, whole in list(experts.named_parameters()):
        part = whole.detach()[: len(whole) // shards]
        spread = DTensor.from_local(part, mesh, placements, run_check=False)
        experts.register_parameter(name, nn.Parameter(spread, requires_grad=whole.requires_grad))
    group = mesh.get_group(mesh.ndim - 1)
    experts.forward = _Spread(held=experts, own=spread_module, group=group, compute=compute)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Spread:
    """The forward pass of a layer's experts; a collective of the ranks that share a copy."""

    held: nn.Module  # whose weights are this rank's
    own: nn.Module  # computes with so many experts; it has no weights itself
    group: dist.ProcessGroup
    compute: torch.dtype

    def __call__(self, states: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        """What the experts make of T tokens [T, H], of which each goes to k: [T, H]."""
        shards, top_k = self.group.size(), chosen.shape[1]
        ids = chosen.flatten()
        order = ids.argsort(stable=True)  # by expert, and so by rank
        counts = ids.new_zeros(shards, count_experts(self.held) // shards)
        counts.view(-1).scatter_add_(0, ids, torch.ones_like(ids))
        coming = torch.empty_like(counts)  # of each rank, for each expert here
        dist.all_to_all_single(coming, counts, group=self.group)
        there, here = torch.stack([counts.sum(1), coming.sum(1)]).tolist()
        rows = _Exchange.apply(states[order // top_k], there, here, self.group)
        experts = torch.arange(coming.shape[1], device=ids.device).repeat(shards)
        experts = experts.repeat_interleave(coming.flatten(), output_size=sum(here))
        back = _Exchange.apply(self._compute(rows, experts), here, there, self.group)
        outputs = back[order.argsort()].view(*chosen.shape, states.shape[1])
        return (outputs * gates[..., None]).sum(1).to(states.dtype)

    def _compute(self, rows: Tensor, experts: Tensor) -> Tensor:
        """What this rank's experts make of rows [R, H], by the expert [R] of each."""
        # Without a row weights would have no gradient, and the optimizer would pass over them.
        lack = int(not len(rows))
        weights = {
            name: weight.to_local().to(self.compute)
            for name, weight in self.held.named_parameters()
            if isinstance(weight, DTensor)
        }
        column = (pad(experts, (0, lack))[:, None], rows.new_ones(len(rows) + lack, 1))
        outputs: Tensor = functional_call(self.own, weights, (pad(rows, (0, 0, 0, lack)), *column))
        return outputs[: len(rows)]


class _Exchange(torch.autograd.Function):
    """Rows [R, H], `there` of them to each rank in order, become those that come: `here` of each."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, there: list[int], here: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes, ctx.group = (there, here), group
        return _exchanged(rows, there, here, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        there, here = ctx.sizes
        return _exchanged(grad, here, there, ctx.group), None, None, None


def _exchanged(rows: Tensor, there: list[int], here: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(here), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), here, there, group=group)
    return received
