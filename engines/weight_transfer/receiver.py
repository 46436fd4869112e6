"""An engine's side of a transfer: the tensors of a version, as its trainer sends them."""

from __future__ import annotations

import contextlib
import math
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from engines.weight_transfer.broadcast_group import BroadcastGroup, Seat
from engines.weight_transfer.line import Line, connect
from engines.weight_transfer.offer import BUFFERS, TransferFailed, TransferOffer
from engines.weight_transfer.shared_buffers import open_shared, place_of
from storage.batches.tensors import dtype_of
from storage.runs.weights import TensorOutline

PATIENCE = 1.25  # times the offer's timeout: a receiver waits longer than its sender does
REACH = 0.25  # times the timeout, in which a trainer is reached


class Receiver:
    """Of one process; it stays in its broadcast group from version to version."""

    def __init__(self, device: torch.device) -> None:
        """`device`: where tensors are to be."""
        self._device = device
        self._member = uuid.uuid4().hex
        self._group: BroadcastGroup | None = None

    def tensors(self, offer: TransferOffer) -> Iterator[tuple[str, Tensor]]:
        """All tensors in the order of the offer, each in memory of its own.

        Raises TransferFailed where they do not come, which takes three times the offer's timeout at
        most.
        """
        trainer = f"the trainer of version {offer.version}"
        line = connect(offer.host, offer.port, trainer, REACH * offer.timeout)
        why = "it was not taken to the end"
        try:
            hello = {
                "token": offer.token,
                "member": self._member,
                "group": "" if self._group is None else self._group.name,
                "place": place_of(self._device),
            }
            line.send(hello, time.monotonic() + REACH * offer.timeout)
            # It waits for others as long, and may have begun to when this one came.
            begin = line.receive(time.monotonic() + PATIENCE * offer.timeout)
            if "refused" in begin:
                raise TransferFailed(str(begin["refused"]))
            until = time.monotonic() + PATIENCE * offer.timeout
            sizes = _sizes(offer)
            pieces = (self._shared if offer.way == "ipc" else self._broadcast)(
                line, begin, sizes, until, offer
            )
            yield from _assembled(offer.tensors, pieces, self._device)
            line.send({"done": True}, until)
            why = ""
        except TransferFailed as error:
            why = str(error)
            raise
        finally:
            if why:
                with contextlib.suppress(TransferFailed):  # the trainer may be the reason
                    line.send({"failed": why}, time.monotonic() + 1)
                if offer.way == "nccl":
                    self.close()  # others may be in the middle of a broadcast
            line.close()

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.abandon()
        self._group = None

    def _shared(
        self,
        line: Line,
        begin: Mapping[str, Any],
        sizes: list[int],
        until: float,
        offer: TransferOffer,
    ) -> Iterator[Tensor]:
        """The pieces in the buffers of the trainer; each is good until the next is asked for."""
        buffers = open_shared(begin["buffers"], self._device)
        for number, size in enumerate(sizes):
            message = line.receive(until)
            if message != {"piece": number}:
                raise TransferFailed(f"{line.name} sends {message}, not piece {number}")
            yield buffers[number % BUFFERS][:size]
            if self._device.type == "cuda":  # what the taker was told to copy has been copied
                torch.cuda.current_stream(self._device).synchronize()
            line.send({"taken": number}, until)

    def _broadcast(
        self,
        line: Line,
        begin: Mapping[str, Any],
        sizes: list[int],
        until: float,
        offer: TransferOffer,
    ) -> Iterator[Tensor]:
        """The pieces that are broadcast; while the taker has one the next is coming."""
        group = self._join(begin, offer)

        def check() -> None:
            if (message := line.arrived()) is not None:
                raise TransferFailed(f"{line.name} sends {message} in the middle")

        buffers = [
            torch.empty(max(sizes, default=0), dtype=torch.uint8, device=self._device)
            for _ in range(BUFFERS)
        ]
        parts = [buffers[number % BUFFERS][:size] for number, size in enumerate(sizes)]
        coming = group.broadcast(parts[0]) if parts else None
        for number, part in enumerate(parts):
            assert coming is not None
            group.wait(coming, until, check)
            if number + 1 < len(parts):
                coming = group.broadcast(parts[number + 1])
            yield part

    def _join(self, begin: Mapping[str, Any], offer: TransferOffer) -> BroadcastGroup:
        if self._group is not None and self._group.name == begin["group"]:
            return self._group
        self.close()
        seat = Seat(
            group=begin["group"],
            rank=begin["rank"],
            size=begin["size"],
            host=offer.host,
            port=begin["port"],
        )
        self._group = BroadcastGroup(seat, self._device, offer.timeout)
        return self._group


def _sizes(offer: TransferOffer) -> list[int]:
    """Bytes of each piece."""
    nbytes = sum(outline.nbytes for outline in offer.tensors.values())
    return [min(offer.piece, nbytes - start) for start in range(0, nbytes, offer.piece)]


def _assembled(
    outlines: Mapping[str, TensorOutline], pieces: Iterator[Tensor], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Tensors, of the bytes of pieces that follow one another."""
    piece, at = torch.empty(0, dtype=torch.uint8, device=device), 0
    for name, outline in outlines.items():
        size = math.prod(outline.shape)
        flat = torch.empty(size, dtype=dtype_of(outline.dtype), device=device)
        target, filled = flat.view(torch.uint8), 0
        while filled < outline.nbytes:
            if at == len(piece):
                piece, at = next(pieces), 0
            count = min(len(piece) - at, outline.nbytes - filled)
            target[filled : filled + count].copy_(piece[at : at + count])
            at, filled = at + count, filled + count
        yield name, flat.view(outline.shape)
    assert next(pieces, None) is None, "sizes are of the same tensors"
