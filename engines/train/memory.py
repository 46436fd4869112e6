"""What a train rank holds of its device's or its machine's memory, and what makes it hold less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from configs.train import TrainConfig
from engines.train.optimizer import Optimizer
from engines.workers.engine import Memory

PASS = "a forward or backward pass"  # activations, logits, gathered layers
OTHERS = "other processes"
PUT_AWAY = "weights and optimizer, put away while another role has the device"


def held_by_rank(
    parameters: Sequence[nn.Parameter],
    optimizer: Optimizer | None,
    device: torch.device,
    memory: Memory,
) -> dict[str, int]:
    """Bytes of this process by what holds them; of a device also those of other processes.

    What is no weight, gradient or moment is taken to be of the pass that is under way. On the
    machine's side that is everything else of the process, its libraries too.

    parameters: This rank's parts, as they were when the model had been sharded. In the middle of a
    pass a module's own are the gathered ones, which have no gradients yet.
    """
    moments = [] if optimizer is None else list(optimizer.moments().values())
    masters = [] if optimizer is None else optimizer.masters.tensors
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gradients += [] if optimizer is None else optimizer.masters.gradients.tensors
    kind = "cpu" if memory == "host" else device.type
    sizes = {
        "weights": _size(parameters, kind),
        "gradients": _size(gradients, kind),
        "optimizer": _size(moments, kind),
    }
    if size := _size(masters, kind):
        sizes["master weights"] = size
    counted = sum(sizes.values())
    if kind == "cpu":
        return {**sizes, PASS: max(psutil.Process().memory_info().rss - counted, 0)}
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allocated = torch.cuda.memory_allocated(device)
    return {**sizes, PASS: max(allocated - counted, 0), OTHERS: max(total - free - reserved, 0)}


def on_device(module: nn.Module, optimizer: Optimizer | None, device: torch.device) -> list[Tensor]:
    """What a rank holds between two calls on its device, gathered layers let go of first."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    tensors += (
        [] if optimizer is None else [*optimizer.moments().values(), *optimizer.masters.tensors]
    )
    return [tensor for tensor in tensors if tensor.device.type == device.type]


def _size(tensors: Sequence[Tensor], kind: str) -> int:
    """Bytes of this rank's parts of those tensors that are on a kind of device."""
    local_tensors = [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors
    ]
    return sum(tensor.nbytes for tensor in local_tensors if tensor.device.type == kind)


def setting_for_less(
    train: TrainConfig, memory: Memory, held: Mapping[str, int], frozen: bool = False
) -> str:
    """Which setting makes the largest holder smaller, as a sentence; frozen: of a role that is."""
    largest = max(held, key=lambda name: held[name], default=PASS)
    if largest == OTHERS:
        return "Give the engine a pool of its own (cluster.roles), or the others a smaller share."
    if largest == "optimizer" and memory == "device" and train.optimizer_device == "device":
        return "Set train.optimizer_device = host, or raise cluster.pools.NAME.workers of its pool."
    whole = train.weights_dtype == "float32" and train.compute_dtype == "bfloat16"
    if largest == "weights" and memory == "device" and whole and not frozen:
        return (
            "Set train.weights_dtype = bfloat16, or raise cluster.pools.NAME.workers of its pool."
        )
    if largest == "master weights" and train.master_weights == "float32":
        return (
            "Set train.weights_dtype = bfloat16 and train.master_weights = remainder, or raise the "
            "number of ranks, cluster.pools.NAME.workers of its pool."
        )
    if largest != PASS:
        return "Raise the number of ranks, cluster.pools.NAME.workers of its pool."
    lower = f"train.micro_batch_tokens lower than {train.micro_batch_tokens}"
    if train.gradient_checkpointing < 1:
        return f"Set train.gradient_checkpointing = true, or {lower}."
    return f"Set {lower}, or train.logit_chunk_tokens lower than {train.logit_chunk_tokens}."
