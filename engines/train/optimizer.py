"""AdamW with a schedule, a global bound on the gradient, and a guard against what is not finite.

Its moments, and the masters of weights, may lie in the host's memory, or in fewer bits. They are
brought to the parameter's device, used as float32, and written back, so that a step is the same to
the bit wherever they lie: AdamW is element-wise. They come in pieces, on a GPU from pinned memory
(device_memory.py) and on three streams: while one piece is used the next comes and the last one goes,
in both directions of the bus at once. In bfloat16 moments are written back with stochastic rounding:
the second moment changes by a share of 1 - beta2 in a step, and from beta2 = 0.996 on that is less
than half of bfloat16's last digit (2^-8), so that rounding to the nearest would never let it fall.

In eight bits they are codes in blocks, each with its largest magnitude: "8-bit Optimizers via
Block-wise Quantization" (arXiv:2110.02861), whose dynamic code has some seven decades below a block's
largest. Blocks are parts of rows, so that they are the same on any number of ranks, which share a
parameter by rows. torchao's optimizers of 8 and 4 bits are not used: they compile their step, and
their moments are tensors of a kind that a snapshot would have to know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from configs.train import TrainConfig
from engines.train.model.master_weights import MasterWeights, Remainder, joined, split
from engines.train.optimizer_pieces import SLOTS, block_of, parts_of
from engines.workers.device_memory import pin


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


MOMENTS = ("exp_avg", "exp_avg_sq")
LARGEST = {name: f"{name}_largest" for name in MOMENTS}  # of the blocks of those in eight bits
MASTER, REMAINDER = "master", "remainder"


def make_adamw(
    parameters: Iterable[nn.Parameter], config: TrainConfig, masters: MasterWeights
) -> torch.optim.AdamW:
    """AdamW of (sharded) parameters with its state made, all zeros."""
    kind: Callable[..., torch.optim.AdamW] = torch.optim.AdamW
    moved = config.optimizer_device == "host" or config.optimizer_dtype != "float32"
    if moved or masters.tensors:
        kind = partial(FetchingAdamW, masters)
    optimizer = kind(
        parameters,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )
    away: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            device = "cpu" if config.optimizer_device == "host" else parameter.device
            pinned = config.optimizer_device == "host" and parameter.device.type == "cuda"
            moments = _moments(parameter, config, device, pinned)
            away += moments.values() if pinned else []
            steps = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {"step": steps, **moments}
    pin(away)
    return optimizer


def _moments(
    parameter: nn.Parameter, config: TrainConfig, device: torch.device | str, pinned: bool
) -> dict[str, Tensor]:
    """The moments of a (sharded) parameter by the names of its state, zeros unless `pin` follows."""
    fresh = torch.empty_like if pinned else torch.zeros_like
    dtype, block = torch.float32, 0
    if config.optimizer_dtype == "bfloat16":
        dtype = torch.bfloat16
    elif config.optimizer_dtype == "8bit" and (block := block_of(parameter.shape)):
        dtype = torch.uint8
    moments = {
        name: fresh(parameter, device=device, dtype=dtype, requires_grad=False) for name in MOMENTS
    }
    for name in MOMENTS if block else ():
        blocks = parameter[0].numel() // block
        scales = torch.zeros(len(_own(parameter)), blocks, device=device)
        whole = scales
        if isinstance(parameter, DTensor):
            whole = DTensor.from_local(
                scales,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=torch.Size([len(parameter), blocks]),
                stride=(blocks, 1),
            )
        moments[LARGEST[name]] = whole
    return moments


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements of a parameter, and what belongs to them; each [elements]."""

    own: Tensor  # of the parameter, on its device
    gradient: Tensor
    steps: Tensor  # [] made so far, which the step raises
    # By MOMENTS, LARGEST (these [blocks]), MASTER, REMAINDER: those that the parameter has.
    kept: dict[str, Tensor]
    group: dict[str, Any]  # of the optimizer
    start: int  # of its elements in this rank's part
    remainder: Remainder | None  # of the parameter


class FetchingAdamW(torch.optim.AdamW):
    """Makes a step piece by piece, with moments and masters fetched for it."""

    def __init__(
        self, masters: MasterWeights, parameters: Iterable[nn.Parameter], **settings: Any
    ) -> None:
        super().__init__(parameters, **settings)
        self._masters = masters

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient; `closure` is not used."""
        pieces: list[_Piece] = []
        near: list[_Piece] = []
        for piece in self._pieces():
            (near if self._is_near(piece) else pieces).append(piece)
        for group in self.param_groups:
            _update_together([piece for piece in near if piece.group is group])
        if not pieces:
            return
        slots = [_Slot(pieces, self._is_away) for _ in range(SLOTS)]
        with _lanes(pieces[0].own.device, any(slot.buffers for slot in slots)) as lanes:
            for number, piece in enumerate(pieces):
                slot = slots[number % SLOTS]
                moves = slot.moves(piece)
                with lanes.fetching(slot):
                    for source, buffer in moves:
                        buffer.copy_(source, non_blocking=True)
                with lanes.using(slot):
                    _update(piece, slot.near(piece))
                with lanes.writing(slot):
                    for source, buffer in moves:
                        source.copy_(buffer, non_blocking=True)

    def _pieces(self) -> Iterator[_Piece]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, beside = self.state[parameter], self._masters.beside(parameter)
                before = state["step"]
                moments = {name: value for name, value in state.items() if name != "step"}
                remainder = beside if isinstance(beside, Remainder) else None
                if remainder is not None:
                    moments[REMAINDER] = remainder.bits
                elif isinstance(beside, Tensor):
                    moments[MASTER] = beside
                local, gradient = _own(parameter).view(-1), _own(parameter.grad).reshape(-1)
                parts = {name: _own(value).view(-1) for name, value in moments.items()}
                for start, stop in parts_of(len(local)):
                    yield _Piece(
                        own=local[start:stop],
                        gradient=gradient[start:stop],
                        steps=before if stop == len(local) else before.clone(),
                        kept={
                            name: part[_places(start, stop, len(local), len(part))]
                            for name, part in parts.items()
                        },
                        group=group,
                        start=start,
                        remainder=remainder,
                    )

    def _is_near(self, piece: _Piece) -> bool:
        """Whether nothing of it is to be fetched, nor rounded."""
        return not any(
            self._is_away(moment, piece.own) or moment.dtype != torch.float32
            for moment in piece.kept.values()
        )

    @staticmethod
    def _is_away(moment: Tensor, local: Tensor) -> bool:
        return moment.device != local.device


class _Slot:
    """Memory of the device for the parts of a piece that are away."""

    def __init__(self, pieces: Sequence[_Piece], is_away: Callable[[Tensor, Tensor], bool]) -> None:
        self._is_away = is_away
        sizes: dict[tuple[str, torch.dtype], int] = {}
        for piece in pieces:
            for name, moment in piece.kept.items():
                if is_away(moment, piece.own):
                    place = (name, moment.dtype)
                    sizes[place] = max(sizes.get(place, 0), len(moment))
        self.buffers = {
            place: torch.empty(size, dtype=place[1], device=pieces[0].own.device)
            for place, size in sizes.items()
        }
        self.fetched: torch.cuda.Event | None = None
        self.used: torch.cuda.Event | None = None
        self.written: torch.cuda.Event | None = None

    def near(self, piece: _Piece) -> dict[str, Tensor]:
        """What is kept of a piece, on the device: here, or where it is."""
        return {
            name: self.buffers[name, moment.dtype][: len(moment)]
            if self._is_away(moment, piece.own)
            else moment
            for name, moment in piece.kept.items()
        }

    def moves(self, piece: _Piece) -> list[tuple[Tensor, Tensor]]:
        """What is away of a piece, and its place here."""
        near = self.near(piece)
        pairs = [(moment, near[name]) for name, moment in piece.kept.items()]
        return [(moment, here) for moment, here in pairs if here is not moment]


class _Lanes:
    """Where pieces come, are used and go: one after the other."""

    @contextmanager
    def fetching(self, slot: _Slot) -> Iterator[None]:
        yield

    @contextmanager
    def using(self, slot: _Slot) -> Iterator[None]:
        yield

    @contextmanager
    def writing(self, slot: _Slot) -> Iterator[None]:
        yield

    def end(self) -> None:
        """Return once all is written."""


class _Streams(_Lanes):
    """The same on three streams of a GPU, of which the current one uses the pieces."""

    def __init__(self, device: torch.device) -> None:
        self._current = torch.cuda.current_stream(device)
        self._fetch, self._write = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._fetch.wait_stream(self._current)  # whose memory the slots' may have been

    @contextmanager
    def fetching(self, slot: _Slot) -> Iterator[None]:
        with torch.cuda.stream(self._fetch):
            if slot.written is not None:
                self._fetch.wait_event(slot.written)
            yield
            slot.fetched = self._fetch.record_event()

    @contextmanager
    def using(self, slot: _Slot) -> Iterator[None]:
        assert slot.fetched is not None
        self._current.wait_event(slot.fetched)
        yield
        slot.used = self._current.record_event()

    @contextmanager
    def writing(self, slot: _Slot) -> Iterator[None]:
        with torch.cuda.stream(self._write):
            assert slot.used is not None
            self._write.wait_event(slot.used)
            yield
            slot.written = self._write.record_event()

    def end(self) -> None:
        for stream in (self._fetch, self._current, self._write):
            stream.synchronize()


@contextmanager
def _lanes(device: torch.device, moves: bool) -> Iterator[_Lanes]:
    lanes = _Streams(device) if moves and device.type == "cuda" else _Lanes()
    try:
        yield lanes
    finally:
        lanes.end()


def _update_together(pieces: Sequence[_Piece]) -> None:
    """The step of pieces by a few kernels: all of them is on the device, in float32."""
    if not pieces:
        return
    adamw(
        [piece.kept.get(MASTER, piece.own) for piece in pieces],
        [piece.gradient for piece in pieces],
        [piece.kept["exp_avg"] for piece in pieces],
        [piece.kept["exp_avg_sq"] for piece in pieces],
        [],
        [piece.steps for piece in pieces],
        **_settings(pieces[0].group),
    )
    rounded = [(piece.own, piece.kept[MASTER]) for piece in pieces if MASTER in piece.kept]
    if rounded:
        local_tensors, masters = zip(*rounded, strict=True)
        torch._foreach_copy_(list(local_tensors), list(masters))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Of an optimizer's group, as the function of one step takes them."""
    return {
        "fused": True,
        "amsgrad": False,
        "beta1": group["betas"][0],
        "beta2": group["betas"][1],
        "lr": group["lr"],
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "maximize": False,
    }


def _update(piece: _Piece, near: dict[str, Tensor]) -> None:
    """The step of a piece, whose moments and master are on its device."""
    moments = [_as_float32(near, name) for name in MOMENTS]
    remainder, weights = piece.remainder, near.get(MASTER, piece.own)
    if remainder is not None:
        weights = joined(piece.own, near[REMAINDER], remainder.ties.get(piece.start))
    adamw(
        [weights],
        [piece.gradient],
        [moments[0]],
        [moments[1]],
        [],
        [piece.steps],
        **_settings(piece.group),
    )
    for name, new in zip(MOMENTS, moments, strict=True):
        if LARGEST[name] in near:
            encode(new, near[name], near[LARGEST[name]], signed=name == "exp_avg")
        elif near[name] is not new:
            near[name].copy_(stochastically_rounded(new))
    if remainder is not None:
        remainder.ties[piece.start] = split(weights, piece.own, near[REMAINDER])
    elif weights is not piece.own:
        piece.own.copy_(weights)


def _as_float32(near: dict[str, Tensor], name: str) -> Tensor:
    """A moment of a piece."""
    if LARGEST[name] in near:
        return decode(near[name], near[LARGEST[name]], signed=name == "exp_avg")
    return near[name].to(torch.float32)


def _places(start: int, stop: int, length: int, places: int) -> slice:
    """Of elements among `length`, where each place is of equally many."""
    block = max(length, 1) // max(places, 1)
    return slice(start // block, stop // block) if block > 1 else slice(start, stop)


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


DECADES = 7  # of the code, below a block's largest


@cache
def code(signed: bool, device: torch.device) -> Tensor:
    """The 256 numbers that a code can mean, ascending, float32 [256]: the paper's dynamic code.

    0, 1, and in the decade (10^(e-1), 10^e], for e from -6 to 0, the middles of 2^(e+6) equal parts;
    of both signs, or of twice as many parts.
    """
    levels = [torch.tensor([0.0, 1.0])]
    for decade in range(DECADES):
        parts = 2 ** (decade if signed else decade + 1)
        edges = torch.linspace(0.1, 1, parts + 1)
        middles = 10.0 ** (decade - DECADES + 1) * (edges[:-1] + edges[1:]) / 2
        levels += [middles, -middles] if signed else [middles]
    return torch.cat(levels).sort().values.to(device)


@cache
def _lowest(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """By the upper half of a share's bits [65536] the lowest nearest code of such shares, int32.

    And [256] where a code ends, midway to the next. No two ends have the same upper half, so that one
    comparison gives the nearest code: a search among them takes ten times as long.
    """
    levels = code(signed, torch.device("cpu"))
    ends = torch.cat([(levels[1:] + levels[:-1]) / 2, torch.tensor([float("inf")])])
    halves = torch.arange(1 << 16, dtype=torch.int32)
    # Of numbers below 0 the smallest has all the lower bits.
    bits = (halves << 16) | torch.where(halves < 1 << 15, 0, 0xFFFF).to(torch.int32)
    shares = bits.view(torch.float32).nan_to_num(0.0)
    lowest = torch.searchsorted(ends[:-1], shares, out_int32=True)
    return lowest.to(device), ends.to(device)


def encode(values: Tensor, codes: Tensor, largest: Tensor, signed: bool) -> None:
    """Write the code of each value that is nearest to it, as a share of its block's largest.

    A second moment (not signed) that is not 0 never becomes 0: a step divides by its root.

    Args:
        values: float32 [n], finite.
        codes: uint8 [n], written.
        largest: float32 [blocks], of blocks of n / blocks values; written.
        signed: Whether values may be negative.
    """
    if not len(largest):
        return
    blocks = values.view(len(largest), -1)
    torch.amax(blocks.abs(), dim=1, out=largest)
    shares = blocks / largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    lowest, ends = _lowest(signed, values.device)
    halves = (shares.view(torch.int32) >> 16).bitwise_and_(0xFFFF).view(-1)
    nearest = lowest.index_select(0, halves)
    nearest += shares.view(-1) > ends.index_select(0, nearest)
    if not signed:
        nearest.clamp_(min=(values > 0).to(torch.int32))
    codes.copy_(nearest)


def decode(codes: Tensor, largest: Tensor, signed: bool) -> Tensor:
    """The values, float32 [n], of codes, uint8 [n], in blocks whose largest are float32 [blocks]."""
    if not len(largest):
        return torch.zeros_like(codes, dtype=torch.float32)
    shares = code(signed, codes.device).index_select(0, codes.to(torch.int32))
    return shares.view(len(largest), -1).mul_(largest[:, None]).view(-1)
