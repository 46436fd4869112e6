"""What ranks do together to send a policy version to engines, past the store; a collective.

Rank 0 gathers each whole tensor and sends it, in pieces. Where engines share devices with several
ranks, each of these fills buffers on its own device, and rank 0 tells the engines of all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from engines.train.model.fsdp import gather, on_first, together
from engines.weight_transfer.offer import (
    BUFFERS,
    PIECE,
    Transfer,
    TransferOffer,
    TransferReport,
)
from engines.weight_transfer.sender import Groups, Sender
from engines.weight_transfer.shared_buffers import SharedBuffers, place_of
from storage.batches.tensors import dtype_of
from storage.runs.weights import TensorOutline

T = TypeVar("T")


class WeightSending:
    """One rank's part of the transfers of a trainer: first `offer`, then `send`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, host: str) -> None:
        """`host`: of rank 0, as receivers reach it. device: of this rank."""
        self._group, self._device, self._host = group, device, host
        self._groups = Groups()
        self._sender: Sender | None = None  # of rank 0
        self._shared: SharedBuffers | None = None  # of this rank, while it sends
        self._outlines: Mapping[str, TensorOutline] = {}
        self._places: list[str] = []  # of the ranks' devices
        self._offer: TransferOffer | None = None

    def offer(
        self,
        way: Transfer,
        version: int,
        outlines: Mapping[str, TensorOutline],
        receivers: int,
        timeout: float,
        piece: int = PIECE,
    ) -> TransferOffer:
        """Begin to listen for receivers; what they need to come. An offer before it is withdrawn."""
        self._withdraw()
        self._places = together(self._group, lambda: place_of(self._device))
        self._outlines = outlines

        def listen() -> TransferOffer:
            self._sender = Sender(
                way=way,
                host=self._host,
                version=version,
                tensors=outlines,
                receivers=receivers,
                timeout=timeout,
                piece=piece,
                places=set(self._places),
                groups=self._groups,
                device=self._device,
            )
            return self._sender.offer

        self._offer = on_first(self._group, listen)
        return self._offer

    @torch.no_grad()
    def send(self, version: int, state: Mapping[str, Tensor]) -> TransferReport:
        """Send the tensors that were offered to the receivers that come.

        Returns when they have them, or have failed: after twice the offer's timeout at the latest.
        """
        offer, self._offer = self._offer, None
        if offer is None or offer.version != version:  # of ranks that were lost since
            return TransferReport(receivers=0, served=0, seconds=0.0, why="the offer was lost")
        try:
            places = on_first(self._group, self._admitted)
            if places:
                self._send(offer, places, state)
            report = on_first(self._group, self._finished)
        finally:
            self._withdraw()
        return report

    def close(self) -> None:
        """Withdraw what is offered, and leave the group of receivers."""
        self._withdraw()
        self._groups.abandon()

    def _send(
        self, offer: TransferOffer, places: Collection[str], state: Mapping[str, Tensor]
    ) -> None:
        ranks = {place: rank for rank, place in reversed([*enumerate(self._places)])}
        shared = offer.way == "ipc"
        servers = {ranks[place] for place in places} if shared else {0}
        rank = self._group.rank()

        def allocate() -> list[Tensor]:
            if rank not in servers:
                return []
            if shared:
                self._shared = SharedBuffers(self._device, offer.piece)
                return self._shared.buffers
            empty = torch.empty(BUFFERS, offer.piece, dtype=torch.uint8, device=self._device)
            return list(empty)

        buffers = _own(self._group, allocate)
        handles = together(
            self._group, lambda: None if self._shared is None else self._shared.handle()
        )
        if self._sender is not None:
            at_places = zip(self._places, handles, strict=True)
            self._sender.begin({place: each for place, each in at_places if each is not None})
        self._fill(offer, servers, buffers, state)

    def _fill(
        self,
        offer: TransferOffer,
        servers: Collection[int],
        buffers: list[Tensor],
        state: Mapping[str, Tensor],
    ) -> None:
        """Every tensor in turn, in buffers that are sent when they are full."""
        number = at = 0
        for name, outline in self._outlines.items():
            flat = self._bytes(state[name], outline, servers)
            start = 0
            while start < outline.nbytes:
                count = min(offer.piece - at, outline.nbytes - start)
                if buffers and flat is not None:
                    target = buffers[number % BUFFERS][at : at + count]
                    target.copy_(flat[start : start + count])
                at, start = at + count, start + count
                if at == offer.piece:
                    if self._over(buffers, number, at):
                        return
                    number, at = number + 1, 0
        if at:
            self._over(buffers, number, at)

    def _over(self, buffers: list[Tensor], number: int, nbytes: int) -> bool:
        """Send a piece that all servers have filled; whether nobody is left who receives.

        The piece before it has been taken then, so the other buffer is free.
        """
        if buffers and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        over = False
        if self._sender is not None:
            self._sender.sent()
            over = self._sender.over
        if self._group.size() > 1:  # by Gloo; all ranks come here at the same byte
            said = torch.tensor([int(over)])
            dist.all_reduce(said, dist.ReduceOp.MAX, self._group)
            over = bool(said)
        if self._sender is not None:
            self._sender.send(buffers[number % BUFFERS][:nbytes] if buffers else None)
        return over

    def _bytes(
        self, tensor: Tensor, outline: TensorOutline, servers: Collection[int]
    ) -> Tensor | None:
        """A whole tensor's bytes [bytes] uint8 on every server, None elsewhere; a collective."""
        whole = gather(tensor, dtype_of(outline.dtype), 0, self._group)
        if len(servers) > 1 or 0 not in servers:
            if whole is None:
                whole = torch.empty(
                    outline.shape, dtype=dtype_of(outline.dtype), device=self._device
                )
            whole = whole.to(self._device).contiguous()
            dist.broadcast(whole, group_src=0, group=self._group)
        return None if whole is None else whole.detach().reshape(-1).view(torch.uint8)

    def _admitted(self) -> tuple[str, ...]:
        assert self._sender is not None, "rank 0 has offered"
        return self._sender.admit()

    def _finished(self) -> TransferReport:
        assert self._sender is not None, "rank 0 has offered"
        return self._sender.finish()

    def _withdraw(self) -> None:
        if self._sender is not None:
            self._sender.close()
        if self._shared is not None:  # nobody reads in it any more
            self._shared.close()
        self._sender = self._offer = self._shared = None


def _own(group: dist.ProcessGroup, work: Callable[[], T]) -> T:
    """What `work` gives on this rank; the first rank's error on every one."""
    mine: list[T] = []
    together(group, lambda: mine.append(work()))
    return mine[0]
