"""AdamW whose moments, and masters of weights, may lie in the host's memory; moments in bfloat16 too.

Moments and masters are brought to the parameter's device, used as float32, and written back, so that
a step is the same to the bit wherever they lie: AdamW is element-wise. They come in pieces, on a GPU
from pinned memory (pinned_memory.py) and on three streams: while one piece is used the next comes
and the last one goes, in both directions of the bus at once. In bfloat16 moments are written back
with stochastic rounding: the second moment changes by a share of 1 - beta2 in a step, and from beta2
= 0.996 on that is less than half of bfloat16's last digit (2^-8), so that rounding to the nearest
would never let it fall.

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
from engines.train.memory_plan import PIECE, SLOTS
from engines.train.model.master_weights import MasterWeights
from engines.workers.pinned_memory import pin

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
    away: list[Tensor] = []
    for group in made.param_groups:
        for parameter in group["params"]:
            device = "cpu" if config.optimizer_device == "host" else parameter.device
            pinned = config.optimizer_device == "host" and parameter.device.type == "cuda"
            fresh = torch.empty_like if pinned else torch.zeros_like
            moments = {name: fresh(parameter, device=device, dtype=dtype) for name in MOMENTS}
            away += moments.values() if pinned else []
            steps = torch.zeros((), dtype=torch.float32, device=parameter.device)
            made.state[parameter] = {"step": steps, **moments}
    pin(away)
    return made


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements of a parameter, and what belongs to them; each [elements]."""

    own: Tensor  # of the parameter, on its device
    gradient: Tensor
    steps: Tensor  # [] made so far, which the step raises
    kept: tuple[Tensor, ...]  # the moments and, where the parameter has one, its master
    group: dict[str, Any]  # of the optimizer


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
        pieces = list(self._pieces())
        if not pieces:
            return
        if self._all_near(pieces):
            for group in self.param_groups:
                _update_together([piece for piece in pieces if piece.group is group])
            return
        slots = [_Slot(pieces, self._is_away) for _ in range(SLOTS)]
        with _lanes(pieces[0].own.device, any(slot.buffers for slot in slots)) as lanes:
            for number, piece in enumerate(pieces):
                slot = slots[number % SLOTS]
                moves = slot.moves(piece)
                with lanes.fetching(slot):
                    for kept, buffer in moves:
                        buffer.copy_(kept, non_blocking=True)
                with lanes.using(slot):
                    _update(piece, slot.near(piece))
                with lanes.writing(slot):
                    for kept, buffer in moves:
                        kept.copy_(buffer, non_blocking=True)

    def _pieces(self) -> Iterator[_Piece]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, master = self.state[parameter], self._masters.of(parameter)
                kept = [state[name] for name in MOMENTS]
                kept += [] if master is parameter else [master]
                own, *others = [_own(one).view(-1) for one in (parameter, *kept)]
                gradient, before = _own(parameter.grad).reshape(-1), state["step"]
                for start in range(0, max(len(own), 1), PIECE):
                    stop = min(start + PIECE, len(own))
                    yield _Piece(
                        own=own[start:stop],
                        gradient=gradient[start:stop],
                        steps=before if stop == len(own) else before.clone(),
                        kept=tuple(one[start:stop] for one in others),
                        group=group,
                    )

    def _all_near(self, pieces: Sequence[_Piece]) -> bool:
        """Whether nothing is to be fetched, nor rounded."""
        return not any(
            self._is_away(kept, piece.own) or kept.dtype != torch.float32
            for piece in pieces
            for kept in piece.kept
        )

    @staticmethod
    def _is_away(kept: Tensor, own: Tensor) -> bool:
        return kept.device != own.device


class _Slot:
    """Memory of the device for the parts of a piece that are away."""

    def __init__(self, pieces: Sequence[_Piece], is_away: Callable[[Tensor, Tensor], bool]) -> None:
        self._is_away = is_away
        sizes: dict[int, int] = {}
        for piece in pieces:
            for place, kept in enumerate(piece.kept):
                if is_away(kept, piece.own):
                    sizes[place] = max(sizes.get(place, 0), len(kept))
        first = {place: kept for piece in pieces for place, kept in enumerate(piece.kept)}
        self.buffers = {
            place: torch.empty(size, dtype=first[place].dtype, device=pieces[0].own.device)
            for place, size in sizes.items()
        }
        self.fetched: torch.cuda.Event | None = None
        self.used: torch.cuda.Event | None = None
        self.written: torch.cuda.Event | None = None

    def near(self, piece: _Piece) -> list[Tensor]:
        """What is kept of a piece, on the device: here, or where it is."""
        return [
            self.buffers[place][: len(kept)] if self._is_away(kept, piece.own) else kept
            for place, kept in enumerate(piece.kept)
        ]

    def moves(self, piece: _Piece) -> list[tuple[Tensor, Tensor]]:
        """What is away of a piece, and its place here."""
        pairs = zip(piece.kept, self.near(piece), strict=True)
        return [(kept, near) for kept, near in pairs if near is not kept]


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
    """The step of all pieces by a few kernels: everything is on the device, in float32."""
    if not pieces:
        return
    weights = [piece.kept[2] if len(piece.kept) > 2 else piece.own for piece in pieces]
    adamw(
        weights,
        [piece.gradient for piece in pieces],
        [piece.kept[0] for piece in pieces],
        [piece.kept[1] for piece in pieces],
        [],
        [piece.steps for piece in pieces],
        **_settings(pieces[0].group),
    )
    rounded = [(piece.own, piece.kept[2]) for piece in pieces if len(piece.kept) > 2]
    if rounded:
        own, masters = zip(*rounded, strict=True)
        torch._foreach_copy_(list(own), list(masters))


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


def _update(piece: _Piece, near: Sequence[Tensor]) -> None:
    """The step of a piece, whose moments and master are on its device."""
    moments = [one.to(torch.float32) for one in near[:2]]
    weights = near[2] if len(near) > 2 else piece.own
    adamw(
        [weights],
        [piece.gradient],
        [moments[0]],
        [moments[1]],
        [],
        [piece.steps],
        **_settings(piece.group),
    )
    for moment, new in zip(near[:2], moments, strict=True):
        if moment is not new:
            moment.copy_(stochastically_rounded(new))
    if weights is not piece.own:
        piece.own.copy_(weights)


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
