"""Weights in bfloat16 on the device, each with a float32 master: in the host's memory or beside it.

Masters are what an optimizer step changes, what a snapshot has and what float32 versions are made
of. The device has their rounding, which is what FSDP makes of float32 weights before it gathers them
for products in bfloat16: so all that is computed is the same to the bit.

In place of a master there may be a remainder, the sixteen bits that it has besides its rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from engines.models.adapters import is_factor
from engines.train.model.fsdp import own_part
from engines.train.optimizer_pieces import parts_of
from engines.workers.device_memory import pin

TIE = 1 << 15  # between two neighbours in bfloat16, in units of float32's last bit


@dataclass(frozen=True, slots=True)
class Remainder:
    """What masters have besides their rounding to bfloat16."""

    bits: Tensor  # int16, of the (sharded) parameter's shape
    # By the first element of a piece of this rank's part: which of the piece's [ties], on the host.
    ties: dict[int, Tensor] = field(default_factory=dict)


class MasterWeights:
    """The masters of some (sharded) parameters; what has none is its own."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] = (),
        device: str = "cpu",
        remainders: bool = False,
    ) -> None:
        """Those in bfloat16 among them get a master on a device, zeros until it is set.

        remainders: Matrices get a remainder in its place, and others a master, beside the parameter.
        """
        rounded = [parameter for parameter in parameters if parameter.dtype == torch.bfloat16]
        split = [weight for weight in rounded if remainders and weight.ndim > 1]
        whole = [weight for weight in rounded if not (remainders and weight.ndim > 1)]
        self.gradients = GradientSums()
        self._remainders = {
            weight: Remainder(torch.zeros_like(weight, dtype=torch.int16, requires_grad=False))
            for weight in split
        }
        self._to_round: dict[nn.Parameter, Tensor] = {}
        away = not remainders and device == "cpu"
        away = away and any(weight.device.type == "cuda" for weight in whole)
        fresh = torch.empty_like if away else torch.zeros_like
        self._of = {
            weight: fresh(
                weight, device=weight.device if remainders else device, dtype=torch.float32
            )
            for weight in whole
        }
        if away:
            pin(self.tensors)

    def of(self, weight: Tensor) -> Tensor:
        """The master of a parameter; any other tensor as it is. A copy where it has a remainder."""
        if not isinstance(weight, nn.Parameter):
            return weight
        if weight not in self._remainders:
            return self._of.get(weight, weight)
        master = torch.empty_like(weight, device="cpu", dtype=torch.float32, requires_grad=False)
        into, local = own_part(master)[0].view(-1), own_part(weight)[0].view(-1)
        remainder = self._remainders[weight]
        bits = own_part(remainder.bits)[0].view(-1)
        for start, stop in parts_of(len(local)):
            ties = remainder.ties.get(start)
            into[start:stop].copy_(joined(local[start:stop], bits[start:stop], ties))
        return master

    def to_set(self, weight: Tensor) -> Tensor:
        """The same, whose values are changed in place, for `round` to take."""
        if not isinstance(weight, nn.Parameter) or weight not in self._remainders:
            return self.of(weight)
        if weight not in self._to_round:  # one that is tied has several names
            self._to_round[weight] = self.of(weight)
        return self._to_round[weight]

    def beside(self, parameter: nn.Parameter) -> Tensor | Remainder | None:
        """What a parameter has besides itself."""
        return self._of.get(parameter, self._remainders.get(parameter))

    @property
    def tensors(self) -> list[Tensor]:
        """All masters and remainders; this rank's parts."""
        return [*self._of.values(), *(part.bits for part in self._remainders.values())]

    @torch.no_grad()
    def round(self) -> None:
        """Set the device's weights by the masters, once these have been filled."""
        for parameter, master in self._of.items():
            own_part(parameter)[0].copy_(own_part(master)[0])
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """`round` of what has a remainder, which is to be called again for what is set later."""
        while self._to_round:
            parameter, master = self._to_round.popitem()
            local, remainder = own_part(parameter)[0].view(-1), self._remainders[parameter]
            bits, values = own_part(remainder.bits)[0].view(-1), own_part(master)[0].view(-1)
            for start, stop in parts_of(len(local)):
                piece = values[start:stop].to(local.device)
                remainder.ties[start] = split(piece, local[start:stop], bits[start:stop])


@torch.no_grad()
def split(masters: Tensor, rounded: Tensor, remainder: Tensor) -> Tensor:
    """Set weights to their masters' nearest in bfloat16, and the remainder to what is left.

    As integers, master = 2^16 rounded + remainder, with remainder in [-2^15, 2^15]. A tie goes to the
    even neighbour, above or below, so both ends occur beside one weight, which is a number more than
    sixteen bits hold: the upper end is written as the lower one, and returned.

    Args:
        masters: float32 [n], finite.
        rounded: bfloat16 [n], written.
        remainder: int16 [n], written.

    Returns:
        Which masters have 2^15, one of 2^17 at random: int64 [ties], on the host.
    """
    rounded.copy_(masters)
    digits = masters.view(torch.int32) - (rounded.view(torch.int16).to(torch.int32) << 16)
    remainder.copy_(digits)
    return (digits == TIE).nonzero().view(-1).cpu()


def joined(rounded: Tensor, remainder: Tensor, ties: Tensor | None) -> Tensor:
    """The masters, float32 [n], of what `split` made of them. ties: None before it did."""
    bits = (rounded.detach().view(torch.int16).to(torch.int32) << 16).add_(remainder)
    if ties is not None and len(ties):
        bits[ties.to(bits.device)] += 2 * TIE
    return bits.view(torch.float32)


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
        self._summed: list[nn.Parameter] = []

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
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if parameter in self._sums:
            self._sums[parameter].add_(gradient)
        else:
            self._sums[parameter] = gradient.float()

    def give(self) -> None:
        """Hand each sum over as its weight's gradient; a collective where copies have the same."""
        for parameter, total in self._sums.items():
            if isinstance(total, DTensor):
                _average(total)
            parameter.grad_dtype = total.dtype
            parameter.grad = total
        self._summed = list(self._sums)
        self._sums.clear()

    def take(self) -> None:
        """Be ready for backward passes, after the weights' gradients have been forgotten."""
        for parameter in self._summed:
            parameter.grad_dtype = parameter.dtype
        self._summed = []


@torch.no_grad()
def _average(total: DTensor) -> None:
    """The mean over all ranks, as FSDP's gradients are, of the sum over those that share a copy."""
    mesh, local = total.device_mesh, total.to_local()
    local.div_(mesh.size())
    for copies in range(mesh.ndim - 1):
        dist.all_reduce(local, group=mesh.get_group(copies))


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


def base_weights(
    model: nn.Module, masters: MasterWeights | None = None, to_set: bool = False
) -> dict[str, Tensor]:
    """Every (sharded) weight of a module by its name, or its master, adapters left out.

    to_set: They are changed in place, and `masters.round` called then.
    """
    masters = masters or MasterWeights()
    of = masters.to_set if to_set else masters.of
    state = model.state_dict(keep_vars=True)
    return {name: of(each).detach() for name, each in state.items() if not is_factor(name)}
