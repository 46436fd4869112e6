"""FSDP2: a model spread over the ranks of a gang, one unit per decoder layer.

Here it is sharded, its whole tensors are gathered, and it is set to a published policy version or
compared with one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from engines.failures import WeightMismatch
from engines.train.spec import TensorDifference, WeightsComparison
from storage.batches.tensors import code_of
from storage.objects.store import Store
from storage.runs.weights import WeightsRef, stream, tensor_digest, weights_digest


def shard(
    module: nn.Module, group: dist.ProcessGroup, device: torch.device, compute: torch.dtype
) -> None:
    """Shard a module that holds a language model over a group, in place.

    A lone rank keeps gathered weights between forward and backward pass: there is nothing to save.

    Args:
        module: A policy or a critic, in float32; weights and sums of gradients stay so.
        group: All ranks.
        device: This rank's.
        compute: In what a layer's weights are gathered and multiplied.
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


def whole_tensors(module: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of every weight of a (sharded) module; a collective.

    Args:
        module: Its state's order is that of publication.
        dtype: What floating-point tensors are cast to before they are gathered; None: as they are.
    """
    for name, tensor in module.state_dict().items():
        value = tensor.detach()
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        yield name, value.full_tensor() if isinstance(value, DTensor) else value


def fill(model: nn.Module, store: Store, weights: WeightsRef) -> None:
    """Copy a version's tensors into a (sharded) model; every rank reads all and keeps its part.

    Raises WeightMismatch naming a tensor that one of the two lacks or has in another shape.
    """
    held = model.state_dict()
    missing = set(held)
    for name, tensor in stream(store, weights):
        if name not in held or held[name].shape != tensor.shape:
            has = tuple(held[name].shape) if name in held else "no such tensor"
            raise WeightMismatch(
                f"Tensor {name} of {weights.key} has shape {tuple(tensor.shape)}, the model has "
                f"{has}. Set model to the one that these weights were trained from."
            )
        _copy(held[name], tensor)
        missing.discard(name)
    if missing:
        raise WeightMismatch(
            f"{weights.key} has no tensor {min(missing)}, which the model needs. "
            "Set model to the one that these weights were trained from."
        )


def _copy(target: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        whole = source.to(device=target.device, dtype=target.dtype)
        if isinstance(target, DTensor):
            whole = distribute_tensor(whole, target.device_mesh, target.placements)
        target.copy_(whole)


def compare_weights(
    store: Store, weights: WeightsRef, held: Iterable[tuple[str, Tensor]]
) -> WeightsComparison:
    """`held`, whole tensors in the order of publication, beside the version's own bytes."""
    entries = []
    differing = []
    for (name, mine), (stored_name, stored) in zip(held, stream(store, weights), strict=True):
        entries.append((name, code_of(mine.dtype), tuple(mine.shape), tensor_digest(mine)))
        if name != stored_name or mine.shape != stored.shape:
            raise WeightMismatch(
                f"{weights.key} has {stored_name} {tuple(stored.shape)} where the model has "
                f"{name} {tuple(mine.shape)}. The run was made with another model."
            )
        if entries[-1][3] != tensor_digest(stored) or mine.dtype != stored.dtype:
            gap = (mine.detach().cpu().double() - stored.double()).abs()
            difference = TensorDifference(
                name=name,
                shape=tuple(mine.shape),
                elements=int((gap > 0).sum()),
                largest=float(gap.max()),
            )
            differing.append(difference)
    return WeightsComparison(
        digest=weights_digest(entries), tensors=len(entries), differing=tuple(differing)
    )
