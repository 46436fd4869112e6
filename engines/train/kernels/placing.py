"""Where in a model the kernels of layers.py stand: where a trial shows that they compute the same.

No list of families: a norm, a gated feed-forward part or a rotation whose values and gradients on a
trial are those of the kernel's plain meaning gets the kernel. What differs (another gain, another
activation, an interleaved rotation) stays as it is.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engines.train.kernels import available

ROPE = "apply_rotary_pos_emb"  # a function of each model's module in transformers
GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}  # children of a gated feed-forward part
OFF = 2.0**-6  # relative distance, in norm, of what rounds in bfloat16 here and there


def place_kernels(model: PreTrainedModel, device: torch.device) -> dict[str, int]:
    """Put the kernels where they compute what the model's own code does; how many of each.

    Args:
        model: On any device, the meta device too; changed in place.
        device: On which it will compute, and on which the trials are made.
    """
    counts = {"rms_norm": 0, "swiglu": 0, "rotary": 0}
    alike: dict[tuple[type, str, int], bool] = {}
    for module in model.modules():
        if is_norm(module):
            key = (type(module), "rms_norm", module.get_parameter("weight").numel())
            if key not in alike:
                alike[key] = norm_is_plain(module, device)
            if alike[key]:
                module.forward = partial(_norm, module, _epsilon(module))
                counts["rms_norm"] += 1
        elif set(dict(module.named_children())) == GATED:
            key = (type(module), "swiglu", 0)
            if key not in alike:
                alike[key] = gate_is_plain(module, device)
            if alike[key]:
                module.forward = partial(_gated, module)
                counts["swiglu"] += 1
        place = vars(sys.modules[type(module).__module__])
        if ROPE in place and not isinstance(place[ROPE], Rotation):
            rotation = Rotation(place[ROPE])
            if rotation_is_plain(rotation, device):
                place[ROPE] = rotation
        is_attention = type(module).__name__.endswith("Attention")
        counts["rotary"] += is_attention and isinstance(place.get(ROPE), Rotation)
    return counts


def is_norm(module: nn.Module) -> bool:
    """Whether a module has one vector as its weight and a number to add to a mean of squares."""
    parameters = list(module.named_parameters())
    return (
        [name for name, _ in parameters] == ["weight"]
        and parameters[0][1].dim() == 1
        and not list(module.children())
        and _epsilon(module) > 0
        and not isinstance(module, nn.LayerNorm)
    )


def _epsilon(module: nn.Module) -> float:
    fields = vars(module)
    value = fields.get("variance_epsilon", fields.get("eps", 0.0))
    return value if isinstance(value, float) else 0.0


def _norm(module: nn.Module, epsilon: float, hidden_states: Tensor) -> Tensor:
    from engines.train.kernels.layers import rms_norm

    return rms_norm(hidden_states, module.get_parameter("weight"), epsilon)


def _gated(module: nn.Module, x: Tensor) -> Tensor:
    from engines.train.kernels.layers import swiglu

    parts: Any = module
    result: Tensor = parts.down_proj(swiglu(parts.gate_proj(x), parts.up_proj(x)))
    return result


class Rotation:
    """A model's rotation of queries and keys, by the kernel for a packed row on CUDA."""

    def __init__(self, plain: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.own = plain

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        """As the model's own function, whose arguments these are."""
        packed = q.dim() == 4 and len(q) == 1 and cos.shape == (1, q.shape[2], q.shape[3])
        ours = packed and unsqueeze_dim == 1 and cos.dtype == q.dtype
        if not ours or torch.compiler.is_compiling() or not available(q):
            return self.own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        from engines.train.kernels.layers import rotary

        return rotary(q, cos, sin), rotary(k, cos, sin)


def norm_is_plain(module: nn.Module, device: torch.device) -> bool:
    """Whether a norm is Llama's."""
    from engines.train.kernels.layers import rms_norm

    twin = copy.deepcopy(module).to_empty(device=device).to(torch.bfloat16)
    weight = twin.get_parameter("weight").requires_grad_()
    x = random_values(3, weight.numel(), device=device)
    with torch.no_grad():
        weight.copy_(random_values(weight.numel(), device=device))
    return _alike(twin, lambda x: rms_norm(x, weight, _epsilon(module)), [x], [x, weight])


def gate_is_plain(module: nn.Module, device: torch.device) -> bool:
    """Whether a feed-forward part is down(silu(gate x) * up x)."""
    small: dict[str, nn.Module] = {
        "gate_proj": nn.Linear(16, 32),
        "up_proj": nn.Linear(16, 32),
        "down_proj": nn.Linear(32, 16),
    }
    twin = copy.copy(module)
    twin._modules = {**module._modules, **small}
    for part in small.values():
        part.to(device, torch.bfloat16)
    x = random_values(1, 5, 16, device=device)
    return _alike(twin.forward, partial(_gated, twin), [x], [x])


def rotation_is_plain(rotation: Rotation, device: torch.device) -> bool:
    """Whether a function rotates halves, as Llama's does."""
    q, k = random_values(1, 4, 6, 32, device=device), random_values(1, 2, 6, 32, device=device)
    angles = torch.rand(1, 6, 16, device=device).repeat(1, 1, 2) * 6
    cos, sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)

    def both(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
        return lambda q, k: torch.cat([part.flatten() for part in function(q, k, cos, sin)])

    return _alike(both(rotation.own), both(rotation), [q, k], [q, k])


def random_values(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    """Of a normal distribution, in bfloat16, to take gradients to."""
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    values = torch.randn(shape, generator=generator)
    return values.to(device, torch.bfloat16).requires_grad_()


def _alike(
    plain: Callable[..., Tensor],
    kernel: Callable[..., Tensor],
    inputs: list[Tensor],
    to: list[Tensor],
) -> bool:
    """As `alike`; not where a module takes other arguments, which is of another kind."""
    try:
        return alike(plain, kernel, inputs, to)
    except TypeError:
        return False


def alike(
    plain: Callable[..., Tensor],
    kernel: Callable[..., Tensor],
    inputs: list[Tensor],
    to: list[Tensor],
) -> bool:
    """Whether two functions have the same values and gradients but for rounding."""
    results = []
    for function in (plain, kernel):
        out = function(*inputs)
        slope = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
        results.append([each.detach() for each in (out, *torch.autograd.grad(out, to, slope))])
    return all(
        ours.shape == theirs.shape
        and ours.dtype == theirs.dtype
        and float((ours.float() - theirs.float()).norm()) <= OFF * float(theirs.float().norm())
        for theirs, ours in zip(*results, strict=True)
    )
