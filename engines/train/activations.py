"""What the forward pass keeps for the backward pass: all of it, less, or in the host's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from engines.train.fsdp import layers
from engines.train.memory_plan import checkpointed

SMALL = 2**16  # bytes; a tensor below it is not worth a transfer


def checkpoint_layers(model: PreTrainedModel, share: float) -> None:
    """Have the first layers keep their inputs only, and compute the rest anew in the backward pass.

    `share` of the decoder's layers, rounded up. All gradients are the same to the bit.
    """
    if not share:
        return
    model.gradient_checkpointing_enable({"use_reentrant": False})
    stacked = layers(model)
    for layer in stacked[checkpointed(share, len(stacked)) :]:
        for module in layer.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.gradient_checkpointing = False


@contextlib.contextmanager
def kept_on_host(wanted: bool) -> Iterator[None]:
    """What forward passes in the body keep for the backward pass goes to the host, and comes back.

    Weights do not: FSDP gathers them anew. On a CPU nothing moves.
    """
    if not wanted:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_put_away, _bring_back):
        yield


def _put_away(tensor: Tensor) -> tuple[torch.device, Tensor]:
    device = tensor.device
    weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
    if weight or device.type == "cpu" or tensor.nbytes < SMALL:
        return device, tensor
    # Pinned, so that the copy runs in the device's queue; what follows there may use the memory.
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    kept.copy_(tensor, non_blocking=True)
    return device, kept


def _bring_back(kept: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = kept
    return tensor.to(device, non_blocking=True)
