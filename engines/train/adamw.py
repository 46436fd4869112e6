"""AdamW whose moments, and masters of weights, may lie in the host's memory; moments in bfloat16 too.

Each parameter's moments and master are brought to its device as float32, used, and written back, so
that a step is the same to the bit wherever they lie. In bfloat16 moments are written back with
stochastic rounding: the second moment changes by a share of 1 - beta2 in a step, and from beta2 =
0.996 on that is less than half of bfloat16's last digit (2^-8), so that rounding to the nearest would
never let it fall.

torchao's optimizers of 8 and 4 bits are not used: they compile their step, and their moments are
tensors of a kind that a snapshot would have to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from configs.train import TrainConfig
from engines.train.model.master_weights import MasterWeights

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_adamw(
    parameters: Iterable[nn.Parameter], config: TrainConfig, masters: MasterWeights
) -> torch.optim.AdamW:
    """AdamW of (sharded) parameters with its state made, all zeros."""
    kind: Callable[..., torch.optim.AdamW] = torch.optim.AdamW
    moved = config.optimizer_device == "host" or config.optimizer_dtype == "bfloat16"
    if moved or masters.tensors:
        kind = partial(FetchingAdamW, masters)
    made = kind(
        parameters,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )
    dtype = torch.bfloat16 if config.optimizer_dtype == "bfloat16" else torch.float32
    for group in made.param_groups:
        for parameter in group["params"]:
            device = "cpu" if config.optimizer_device == "host" else parameter.device
            made.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{
                    name: torch.zeros_like(parameter, device=device, dtype=dtype)
                    for name in MOMENTS
                },
            }
    return made


class FetchingAdamW(torch.optim.AdamW):
    """Makes one parameter's step after the other, with moments and master fetched for it."""

    def __init__(
        self, masters: MasterWeights, parameters: Iterable[nn.Parameter], **settings: Any
    ) -> None:
        super().__init__(parameters, **settings)
        self._masters = masters

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient; `closure` is not used."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, own = self.state[parameter], _own(parameter)
        assert parameter.grad is not None
        kept = [_own(state[name]) for name in MOMENTS]
        fetched = [moment.to(own.device, torch.float32) for moment in kept]
        found = self._masters.of(parameter)
        master = own if found is parameter else _own(found)
        weights = master.to(own.device)
        adamw(
            [weights],
            [_own(parameter.grad)],
            [fetched[0]],
            [fetched[1]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for moment, new in zip(kept, fetched, strict=True):
            if moment is not new:
                moment.copy_(new if moment.dtype == new.dtype else stochastically_rounded(new))
        for copy in (master, own):
            if copy is not weights:
                copy.copy_(weights)


def stochastically_rounded(values: Tensor) -> Tensor:
    """bfloat16 [...] of float32 values [...]: one of its two neighbours, the nearer one more often.

    E[rounded x] = x. The sixteen bits that bfloat16 lacks are what a random number of sixteen bits
    carries over or does not; it is drawn by torch's default generator of the device.
    """
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device)
    bits = values.view(torch.int32).add(noise).bitwise_and_(-(1 << 16))
    return bits.view(torch.float32).to(torch.bfloat16)


def _own(tensor: Tensor) -> Tensor:
    """This rank's part; the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
