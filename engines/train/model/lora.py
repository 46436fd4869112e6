"""Low-rank adapters in a train engine: injected before sharding, the only part that is trained.

The layers keep the names of their weights, so a checkpoint is loaded as without adapters; the two
factors of each are parameters of their own beside it. Why merged weights and PEFT's names look as
they do is in engines/models/adapters.py. Experts' products are taken apart from their factors' too
(docs/decisions/lora-of-experts.md).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.moe import grouped_mm_experts_forward

from configs.lora import LoraConfig
from engines.models.adapters import PARAMETERS, factor_names, factor_shapes
from engines.models.routers import are_experts
from engines.train.model.fsdp import own_part
from storage.runs.weights import StackedWeight

FACTORS = "lora"  # the child of a module of experts that has their factors
# Grouped products of torch, and of transformers where torch's are not to be had.
GROUPED = (torch._grouped_mm, torch.ops.transformers.grouped_mm_fallback)
ALIGNED = 8  # rows of grouped products are multiples of 16 bytes: so many numbers of any format


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


class ExpertFactors(nn.Module):
    """The factors of one weight of E experts."""

    lora_A: nn.Parameter  # [E x rank, in], as PEFT has it
    lora_B: nn.Parameter  # [E, out, rank]; PEFT's [out, rank x E] would be copied for each product

    def __init__(self, weight: nn.Parameter, stacked: StackedWeight, lora: LoraConfig) -> None:
        """Float32, not set yet. weight: [E, out, in], or [E, in, out]; stacked: what it is called."""
        super().__init__()
        self.stacked, self.scale = stacked, lora.scale
        a, (out, _) = factor_shapes(weight.shape, lora.rank, stacked)
        self.lora_A = nn.Parameter(torch.empty(a, device=weight.device))
        b = torch.empty(len(weight), out, lora.rank, device=weight.device)
        self.lora_B = nn.Parameter(b)

    def beside(self, product: Callable[..., Tensor], rows: Tensor, *groups: Any) -> Tensor:
        """s (x A^T) B^T of each row's expert, [S, out].

        Args:
            product: Of rows [S, n] and matrices [E, n, m], grouped by expert.
            rows: x [S, in] of S pairs of a token and its expert, expert after expert.
            groups: Where each expert's rows end, as `product` takes it.
        """
        b: Tensor = self.lora_B
        a = self.lora_A.view(len(b), -1, rows.shape[1])
        if lack := -b.shape[2] % ALIGNED:
            a, b = functional.pad(a, (0, 0, 0, lack)), functional.pad(b, (0, lack))
        low = product(rows, a.transpose(1, 2), *groups)
        return self.scale * product(low, b.transpose(1, 2), *groups)


class AdaptedExperts(TorchFunctionMode):
    """Within it the grouped products of a module of experts have their factors' products added."""

    def __init__(self, factors: Mapping[str, ExpertFactors], gated: bool) -> None:
        """factors: by the weight's name; gated: whether the first product is of gate and up both."""
        super().__init__()
        names = ["gate_up_proj" if gated else "up_proj", "down_proj"]
        self._coming = [factors.get(name) for name in names]

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        named = named or {}
        out = function(*arguments, **named)
        if function not in GROUPED:
            return out
        rows, _, *groups = arguments
        factors = self._coming.pop(0)
        if factors is None:
            return out
        return out + factors.beside(partial(function, **named), rows, *groups)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        assert error is not None or not self._coming, "experts' products were not seen"


class FactorsOfExperts(nn.ModuleDict):
    """The factors of a module of experts, by the weight's name."""

    adapted = True  # False: the base alone

    def forward(
        self, base: Callable[..., Tensor], experts: nn.Module, *inputs: Tensor, **named: Tensor
    ) -> Tensor:
        """What experts that are adapted compute; base: their own forward pass."""
        if not self.adapted:
            return base(*inputs, **named)
        factors = {name: each for name, each in self.items() if isinstance(each, ExpertFactors)}
        with AdaptedExperts(factors, vars(experts)["has_gate"]):
            return grouped_mm_experts_forward(experts, *inputs, **named)


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The decoder's, by name: those that adapters can be put on."""
    return {name: layer for name, layer in _of_decoder(model).items() if type(layer) is nn.Linear}


def expert_weights(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules of the decoder's experts by the names of their weights [E, …]."""
    return {
        f"{name}.{weight}": module
        for name, module in _of_decoder(model).items()
        if are_experts(module)
        for weight, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    }


def _of_decoder(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The decoder's modules by their names in the model."""
    modules = set(model.get_decoder().modules())
    return {name: module for name, module in model.named_modules() if module in modules}


def inject(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Freeze a model and put adapters on its decoder's layers and experts, in place.

    Raises ValueError for a target that names none of them, and where there are none.
    """
    model.requires_grad_(False)
    layers, experts = linear_layers(model), expert_weights(model)
    if refusal := lora.unfit(layers, experts):
        raise ValueError(refusal)
    for name, linear in layers.items():
        parent, _, last = name.rpartition(".")
        if lora.adapts_layer(name):
            setattr(model.get_submodule(parent), last, LoraLinear(linear, lora.rank, lora.scale))
    of_modules: dict[nn.Module, FactorsOfExperts] = {}
    for name, module in experts.items():
        if not lora.adapts_experts(name):
            continue
        weight = name.rpartition(".")[2]
        stacked = StackedWeight(name=name, transposed=vars(module)["is_transposed"])
        factors = ExpertFactors(module.get_parameter(weight), stacked, lora)
        if module not in of_modules:
            of_modules[module] = FactorsOfExperts()
            module.forward = partial(of_modules[module], module.forward, module)
        of_modules[module][weight] = factors
    for module, expert_factors in of_modules.items():
        module.add_module(FACTORS, expert_factors)


@torch.no_grad()
def take_factors(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set the factors of a (sharded) language model to such as `factors` says; a collective."""
    experts = adapted_experts(model)
    for name, places in _sharded_factors(model).items():
        for place, value in zip(
            places, (values[each] for each in _names(name, experts)), strict=True
        ):
            local_value = _as_held(value, len(place)) if value.dim() < place.dim() else value
            own_part(place)[0].copy_(own_part(local_value)[0])


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
        values = torch.empty(a.shape).uniform_(-bound, bound, generator=generator)
        local, begin = own_part(a)
        local.copy_(values.flatten()[begin : begin + local.numel()].view(local.shape))
        own_part(b)[0].zero_()


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """The adapted layers with their names in the language model."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def adapted_experts(model: nn.Module) -> dict[str, StackedWeight]:
    """The adapted weights of experts by the names of their factors' modules."""
    modules = model.named_modules()
    return {name: module.stacked for name, module in modules if isinstance(module, ExpertFactors)}


def factors(model: nn.Module) -> dict[str, Tensor]:
    """Every factor of a (sharded) language model by the name that PEFT has for it; a collective.

    Those of linear layers are what is held, B of experts is a copy.
    """
    experts = adapted_experts(model)
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in _sharded_factors(model).items():
        pair = a, (_as_peft(b) if name in experts else b)
        tensors |= zip(_names(name, experts), pair, strict=True)
    return tensors


def _names(module: str, experts: Mapping[str, StackedWeight]) -> tuple[str, str]:
    """PEFT's of the two factors of a module."""
    weight = experts[module].name if module in experts else f"{module}.weight"
    return factor_names(weight, tuple(experts.values()))


def _as_peft(b: Tensor) -> Tensor:
    """B [E, out, rank], sharded by experts, as [out, rank x E], sharded by rows."""
    return _sharded_by(b, 1).permute(1, 2, 0).flatten(1)


def _as_held(b: Tensor, experts: int) -> Tensor:
    """What `_as_peft` gives as it was."""
    return _sharded_by(b.view(len(b), -1, experts).permute(2, 0, 1), 0)


def _sharded_by(tensor: Tensor, dimension: int) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=(*tensor.placements[:-1], Shard(dimension)))


def _sharded_factors(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each adapted layer, and of experts' weights, by their module's name.

    By way of the state dict: after a forward pass FSDP leaves copies in `compute_dtype`, made for
    the next one, in the parameters' place.
    """
    state = model.state_dict(keep_vars=True)
    a, b = PARAMETERS
    return {
        name: (state[f"{name}.{a}"].detach(), state[f"{name}.{b}"].detach())
        for name in [*(name for name, _ in adapted_layers(model)), *adapted_experts(model)]
    }


@contextmanager
def base_alone(model: nn.Module) -> Iterator[None]:
    """Within it the model computes what its base does, to the bit."""
    layers = [each for each in model.modules() if isinstance(each, LoraLinear | FactorsOfExperts)]
    for layer in layers:
        layer.adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapted = True
