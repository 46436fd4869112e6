"""AdamW with a schedule, a global bound on the gradient, and a guard against what is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from configs.train import TrainConfig
from engines.train.adamw import make_adamw
from engines.train.model.master_weights import MasterWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One optimizer step."""

    grad_norm: float  # of the whole model, before it was bounded
    learning_rate: float
    skipped: bool  # nothing was changed, because the gradient's norm is not finite


class Optimizer:
    """The optimizer of a model's (sharded) parameters."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        total_steps: int | None,
        masters: MasterWeights | None = None,
    ) -> None:
        self.parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.steps = 0  # made so far, skipped ones too: what the schedule goes by
        self.applied = 0  # made so far, skipped ones not: what AdamW's bias correction goes by
        self._config = config
        self._total = total_steps
        self.masters = masters or MasterWeights()
        self._adamw = make_adamw(self.parameters.values(), config, self.masters)

    def step(self, finite: bool = True) -> StepReport:
        """Bound the gradients, apply them, forget them; nothing is applied unless all is finite.

        `finite`: whether every rank's losses were; the norm of the gradients is looked at here.
        """
        self.masters.gradients.give()
        self._check_sums()
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), self._config.max_grad_norm)
        report = self._report(norm, finite)
        if not report.skipped:
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.masters.gradients.take()
        return report

    @torch.no_grad()
    def step_by_tensor(
        self,
        first: Callable[[str], Tensor | None],
        again: Callable[[str], Tensor],
        finite: bool = True,
    ) -> StepReport:
        """`step`, to the bit on a CPU, where only one parameter's gradient is held at a time.

        first: gives this rank's part of a parameter's gradient by name, None where it has none. It
        is asked for all of them, for the norm, before anything is changed. again: gives it once more,
        to be used up.
        """
        norms = {}
        for name, parameter in self.parameters.items():
            if (gradient := first(name)) is not None:
                norms[name] = torch.linalg.vector_norm(_as(parameter, gradient))
        total = torch.linalg.vector_norm(torch.stack(list(norms.values())))
        report = self._report(total, finite)
        for name in () if report.skipped else norms:
            parameter = self.parameters[name]
            parameter.grad = _as(parameter, again(name))
            nn.utils.clip_grads_with_norm_([parameter], self._config.max_grad_norm, total)
            self._adamw.step()  # of those that have a gradient
            parameter.grad = None
        return report

    def _check_sums(self) -> None:
        """Gradients are sums in float32 (master_weights.py), whatever the weights are in."""
        for name, parameter in self.parameters.items():
            dtype = torch.float32 if parameter.grad is None else parameter.grad.dtype
            assert dtype == torch.float32, f"the gradient of {name} was summed in {dtype}"

    def _report(self, norm: Tensor, finite: bool) -> StepReport:
        """Count one step, set its learning rate, and say whether it is made."""
        size = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        rate = learning_rate(self._config, self.steps, self._total)
        skipped = not (finite and math.isfinite(size))
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self.applied += 0 if skipped else 1
        self.steps += 1
        return StepReport(grad_norm=size, learning_rate=rate, skipped=skipped)

    def moments(self) -> dict[str, Tensor]:
        """What AdamW's two moments of every parameter are, by name; the tensors themselves."""
        return {
            f"{part}.{name}": value
            for name, parameter in self.parameters.items()
            for part, value in self._adamw.state[parameter].items()
            if part != "step"
        }

    def resume(self, steps: int, applied: int) -> None:
        """Go on after so many steps, once `moments` have been filled."""
        self.steps, self.applied = steps, applied
        for parameter in self.parameters.values():
            self._adamw.state[parameter]["step"].fill_(float(applied))


def _as(parameter: Tensor, local: Tensor) -> Tensor:
    """This rank's part of a gradient in the form of its (sharded) parameter."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def learning_rate(config: TrainConfig, step: int, total: int | None) -> float:
    """The learning rate of an optimizer step: linear warm-up, then constant, linear or cosine to 0.

    Warm-up step k of W has (k + 1) / W of the peak; a decay reaches 0 after step `total`.

    Args:
        config: Peak, schedule and number of warm-up steps.
        step: Optimizer step of the run, from 0.
        total: Optimizer steps of the run; None only with a constant schedule.

    Raises:
        ValueError: A decay without `total`.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    if total is None:
        raise ValueError(
            f"train.schedule = {config.schedule} needs the number of optimizer steps of the run. "
            "Set train.schedule = constant, or give TrainSpec.total_steps."
        )
    done = (step - config.warmup_steps) / max(total - config.warmup_steps, 1)
    share = 1.0 - min(done, 1.0)
    if config.schedule == "linear":
        return config.learning_rate * share
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * (1 - share)))
