"""Weights in bfloat16 on the device, each with a float32 master: in the host's memory or beside it.

Masters are what an optimizer step changes, what a snapshot has and what float32 versions are made
of. The device has their rounding, which is what FSDP makes of float32 weights before it gathers them
for products in bfloat16: so all that is computed is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from engines.train.model.fsdp import own_part
from engines.workers.pinned_memory import pin


class MasterWeights:
    """The masters of some (sharded) parameters; what has none is its own."""

    def __init__(self, parameters: Iterable[nn.Parameter] = (), device: str = "cpu") -> None:
        """Those in bfloat16 among them get a master on a device, zeros until it is set."""
        rounded = [parameter for parameter in parameters if parameter.dtype == torch.bfloat16]
        away = device == "cpu" and any(one.device.type == "cuda" for one in rounded)
        fresh = torch.empty_like if away else torch.zeros_like
        self.gradients = GradientSums()
        self._of = {one: fresh(one, device=device, dtype=torch.float32) for one in rounded}
        if away:
            pin(self.tensors)

    def of(self, weight: Tensor) -> Tensor:
        """The master of a parameter; any other tensor as it is."""
        return self._of.get(weight, weight) if isinstance(weight, nn.Parameter) else weight

    @property
    def tensors(self) -> list[Tensor]:
        """All masters; this rank's parts."""
        return list(self._of.values())

    @torch.no_grad()
    def round(self) -> None:
        """Set the device's weights by the masters, once these have been filled."""
        for parameter, master in self._of.items():
            own_part(parameter)[0].copy_(own_part(master)[0])


class GradientSums:
    """Gradients of weights that FSDP knows nothing of, added up in float32.

    Of bfloat16 weights on a lone rank, as FSDP does it, without its copies: a backward pass makes a
    weight's gradient in bfloat16, and a hook adds it to the sum at once (10 bytes a weight). Of
    experts that are spread over the ranks of a copy, whose gradients come from all of these. `give`
    makes the sums the weights' gradients for an optimizer step, over all ranks as FSDP's are, `take`
    the contrary for the next backward pass.
    """

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._given: list[nn.Parameter] = []

    @property
    def tensors(self) -> list[Tensor]:
        """All sums so far."""
        return list(self._sums.values())

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up what backward passes make of these from now on."""
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._add)

    @torch.no_grad()
    def _add(self, parameter: nn.Parameter) -> None:
        made, parameter.grad = parameter.grad, None
        assert made is not None
        if parameter in self._sums:
            self._sums[parameter].add_(made)
        else:
            self._sums[parameter] = made.float()

    def give(self) -> None:
        """Hand each sum over as its weight's gradient; a collective where copies have the same."""
        for parameter, total in self._sums.items():
            if isinstance(total, DTensor):
                _average(total)
            parameter.grad_dtype = total.dtype
            parameter.grad = total
        self._given = list(self._sums)
        self._sums.clear()

    def take(self) -> None:
        """Be ready for backward passes, after the weights' gradients have been forgotten."""
        for parameter in self._given:
            parameter.grad_dtype = parameter.dtype
        self._given = []


@torch.no_grad()
def _average(total: DTensor) -> None:
    """The mean over all ranks, as FSDP's gradients are, of the sum over those that share a copy."""
    mesh, own = total.device_mesh, total.to_local()
    own.div_(mesh.size())
    for copies in range(mesh.ndim - 1):
        dist.all_reduce(own, group=mesh.get_group(copies))


def sum_gradients_in_float32(module: nn.Module) -> None:
    """Have FSDP add the gradients of micro-batches up in float32, whatever the weights are in.

    It reduces them over the ranks in float32, and would then cast them to the format of the sharded
    weights before it adds them (torch 2.13, `foreach_reduce`). That format is no setting of FSDP's,
    so the one that it has found is replaced, until `grad_dtype` is enough:
    https://github.com/pytorch/pytorch/issues/170648. Optimizer.step checks what comes of it.
    """
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            state._lazy_init()  # finds the formats; the root, which comes first, does so for all
            group = state._fsdp_param_group
            if group is not None and group._orig_dtype is not None:
                group._orig_dtype = torch.float32
