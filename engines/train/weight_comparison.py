"""A train engine's weights and a published policy version: set to it, or compared with it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from engines.failures import WeightMismatch
from engines.train.spec import TensorDifference, WeightsComparison
from storage.batches.tensors import code_of
from storage.objects.store import Store
from storage.runs.weights import WeightsRef, stream, tensor_digest, weights_digest


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
