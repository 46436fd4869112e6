"""AdamW whose moments, and masters of weights, may lie in the host's memory, or in fewer bits.

Moments and masters are brought to the parameter's device, used as float32, and written back, so that
a step is the same to the bit wherever they lie: AdamW is element-wise. They come in pieces, on a GPU
from pinned memory (device_memory.py) and on three streams: while one piece is used the next comes
and the last one goes, in both directions of the bus at once. In bfloat16 moments are written back
with stochastic rounding: the second moment changes by a share of 1 - beta2 in a step, and from beta2
= 0.996 on that is less than half of bfloat16's last digit (2^-8), so that rounding to the nearest
would never let it fall. Moments in eight bits are those of block_codes.py.

torchao's optimizers of 8 and 4 bits are not used: they compile their step, and their moments are
tensors of a kind that a snapshot would have to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from configs.train import TrainConfig
from engines.train.block_codes import decode, encode
from engines.train.model.master_weights import MasterWeights, Remainder, joined, split
from engines.train.optimizer_pieces import SLOTS, block_of, parts_of
from engines.workers.device_memory import pin

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
                *(scales, parameter.device_mesh, parameter.placements),
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
