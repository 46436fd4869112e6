"""Low-rank adapters in a train engine: injected before sharding, the only part that is trained.

The layers keep the names of their weights, so a checkpoint is loaded as without adapters; the two
factors of each are parameters of their own beside it. Why merged weights and PEFT's names look as
they do is in engines/models/adapters.py.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from configs.lora import LoraConfig
from engines.models.adapters import PARAMETERS, factor_names, is_factor
from engines.train.model.fsdp import own_part
from engines.train.model.master_weights import MasterWeights


class LoraLinear(nn.Linear):
    """A linear layer with a low-rank update: x W^T + bias + s (x A^T) B^T."""

    lora_A: nn.Parameter  # [rank, in]
    lora_B: nn.Parameter  # [out, rank]

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        """Takes over the layer's weight and bias; the factors are float32 and not set yet."""
        bias = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, bias=bias, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features, device=device))
        self.lora_B = nn.Parameter(torch.empty(linear.out_features, rank, device=device))
        self.scale = scale
        self.adapted = True  # False: the base alone

    def forward(self, input: Tensor) -> Tensor:
        out = functional.linear(input, self.weight, self.bias)
        if not self.adapted:
            return out
        low = functional.linear(input, self.lora_A)
        return out + self.scale * functional.linear(low, self.lora_B)


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The decoder's, by name: those that adapters can be put on."""
    modules = model.get_decoder().named_modules()
    return {name: module for name, module in modules if type(module) is nn.Linear}


def inject(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Freeze a model and put adapters on its decoder's linear layers, in place.

    Raises ValueError for a target that names none of them, and where there are none.
    """
    model.requires_grad_(False)
    decoder, layers = model.get_decoder(), linear_layers(model)
    if said := lora.unfit(name.rpartition(".")[2] for name in layers):
        raise ValueError(said)
    for name, linear in layers.items():
        parent, _, last = name.rpartition(".")
        if lora.target_modules == "all-linear" or last in lora.target_modules:
            setattr(decoder.get_submodule(parent), last, LoraLinear(linear, lora.rank, lora.scale))


@torch.no_grad()
def reset(model: nn.Module, seed: int) -> None:
    """Set A as PEFT does, uniform within 1 / sqrt(in), and B to 0: the base's own function.

    The same for any number of ranks: each draws all of A, by the seed and the layer's name, and
    keeps its rows.
    """
    for name, (a, b) in _sharded_factors(model).items():
        key = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
        bound = 1 / math.sqrt(a.shape[1])
        drawn = torch.empty(a.shape).uniform_(-bound, bound, generator=generator)
        own, begin = own_part(a)
        own.copy_(drawn.flatten()[begin : begin + own.numel()].view(own.shape))
        own_part(b)[0].zero_()


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """The adapted layers with their names in the language model."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def factors(model: nn.Module) -> dict[str, Tensor]:
    """Every factor of a (sharded) language model by the name that PEFT has for it."""
    found: dict[str, Tensor] = {}
    for name, own in _sharded_factors(model).items():
        found |= zip(factor_names(f"{name}.weight"), own, strict=True)
    return found


def _sharded_factors(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each adapted layer by its name.

    By way of the state dict: after a forward pass FSDP leaves copies in `compute_dtype`, made for
    the next one, in the parameters' place.
    """
    held = model.state_dict(keep_vars=True)
    a, b = PARAMETERS
    return {
        name: (held[f"{name}.{a}"].detach(), held[f"{name}.{b}"].detach())
        for name, _ in adapted_layers(model)
    }


def base_weights(model: nn.Module, masters: MasterWeights | None = None) -> dict[str, Tensor]:
    """Every (sharded) weight of a module by its name, or its master, adapters left out."""
    masters = masters or MasterWeights()
    held = model.state_dict(keep_vars=True)
    return {name: masters.of(each).detach() for name, each in held.items() if not is_factor(name)}


@contextmanager
def base_alone(model: nn.Module) -> Iterator[None]:
    """Within it the model computes what its base does, to the bit."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer.adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapted = True
