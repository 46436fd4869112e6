"""How a policy or a critic is spread over the ranks of a gang: FSDP2, one unit per decoder layer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard(
    module: nn.Module, group: dist.ProcessGroup, device: torch.device, compute: torch.dtype
) -> None:
    """Shard a module that holds a language model over a group, in place.

    Weights and their gradients' sums stay float32; a layer's weights are gathered in `compute`. A
    lone rank keeps gathered weights between forward and backward pass, for there is nothing to save.
    """
    module.to(device)
    mesh = DeviceMesh.from_group(group, device.type)
    precision = MixedPrecisionPolicy()
    if compute != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    several = group.size() > 1
    for layer in layers(module):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=several)
    fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=False)


def layers(module: nn.Module) -> list[nn.Module]:
    """The decoder's repeated layers: the largest list of modules in it."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    if not lists:
        raise ValueError(
            f"{type(module).__name__} has no list of layers to shard. Choose another model."
        )
    sizes = [sum(parameter.numel() for parameter in found.parameters()) for found in lists]
    return list(lists[sizes.index(max(sizes))])
