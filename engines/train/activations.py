"""What the forward pass keeps for the backward pass: all of it, less, or in the host's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from engines.train.memory_plan import checkpointed
from engines.train.model.fsdp import layers

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm")
SMALL = 2**16  # bytes; a tensor below it is not worth a transfer
Room: TypeAlias = Callable[[Tensor], Tensor | None]  # of the tensor's shape and number format


def checkpoint_layers(
    model: PreTrainedModel, share: float, recompute: Literal["all", "selective"] = "all"
) -> None:
    """Have the first layers keep less, and compute the rest anew in the backward pass.

    All gradients are the same to the bit.

    Args:
        model: Changed in place.
        share: Of the decoder's layers, rounded up.
        recompute: all: a layer keeps its input alone. selective: the results of its matrix products
            and of attention too, so that only what costs memory traffic and no products is made anew.
    """
    if not share:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    model.gradient_checkpointing_enable(options)
    stacked = layers(model)
    for layer in stacked[checkpointed(share, len(stacked)) :]:
        for module in layer.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.gradient_checkpointing = False


def _keep_products(_: object, operator: Any, *args: Any, **named: Any) -> CheckpointPolicy:
    if is_product(operator):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def is_product(operator: Any) -> bool:
    """Whether an operation of torch is a matrix product or attention."""
    name = operator.name().partition(".")[0]
    return name in PRODUCTS or "attention" in name or "attn" in name


def pinned(tensor: Tensor) -> Tensor | None:
    """Room for a device's tensor in the host's memory; None for one that is there already.

    Pinned, so that the copy runs in the device's queue; what follows there may use the memory.
    """
    if tensor.device.type == "cpu":
        return None
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


@contextlib.contextmanager
def kept_on_host(wanted: bool, room: Room = pinned) -> Iterator[None]:
    """What forward passes in the body keep for the backward pass goes to the host, and comes back.

    Weights do not: FSDP gathers them anew. On a CPU nothing moves. What several operations keep goes
    once.

    room: Where a tensor goes; None: it stays.
    """
    if not wanted:
        yield
        return
    away = _Away(room)
    with torch.autograd.graph.saved_tensors_hooks(away.put, _bring_back):
        yield
    away.forget()


class _Away:
    """What forward passes have put away so far."""

    def __init__(self, room: Room) -> None:
        self._room = room
        # By storage and view of it. A storage is known by a weak reference, which keeps its address
        # from being given to another, and not its memory.
        self._copies: dict[tuple[object, ...], tuple[StorageWeakRef, Tensor]] = {}

    def put(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if weight or tensor.nbytes < SMALL:
            return tensor.device, tensor
        storage = StorageWeakRef(tensor.untyped_storage())
        view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        place = (storage.cdata, *view, tensor._version)
        if place in self._copies:
            return tensor.device, self._copies[place][1]
        copy = self._room(tensor)
        if copy is None:
            return tensor.device, tensor
        copy.copy_(tensor, non_blocking=True)
        self._copies[place] = (storage, copy)
        return tensor.device, copy

    def forget(self) -> None:
        """Leave the copies to the graph alone."""
        self._copies.clear()


def _bring_back(saved: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = saved
    return tensor.to(device, non_blocking=True)
