"""The trainer's side of a transfer: rank 0 lets receivers in and sends them pieces.

Nothing in here ends a trainer: a receiver that fails, hangs or never comes loads the version from
the store, and the report says so.
"""

from __future__ import annotations

import hmac
import secrets
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.processes.loopback import listen_at
from engines.weight_transfer.broadcast_group import BroadcastGroup, Seat, open_meeting_point
from engines.weight_transfer.line import Line, ready
from engines.weight_transfer.offer import Transfer, TransferFailed, TransferOffer, TransferReport
from storage.runs.weights import TensorOutline


@dataclass(frozen=True, slots=True)
class _Receiver:
    """One that was let in."""

    line: Line
    member: str  # name of the process
    group: str  # name of the group that it is in
    place: str


class Groups:
    """The broadcast group that a trainer has from one version to the next."""

    def __init__(self) -> None:
        self.group: BroadcastGroup | None = None
        self.members: frozenset[str] = frozenset()  # receivers, by name

    def fits(self, receivers: Collection[_Receiver]) -> bool:
        """Whether all of them, and nobody else, are in the group."""
        if self.group is None or self.members != {each.member for each in receivers}:
            return False
        return all(each.group == self.group.name for each in receivers)

    def abandon(self) -> None:
        """Leave the group; the next version makes another."""
        if self.group is not None:
            self.group.abandon()
        self.group, self.members = None, frozenset()


class Sender:
    """One transfer, on rank 0."""

    def __init__(
        self,
        *,
        way: Transfer,
        host: str,
        version: int,
        tensors: Mapping[str, TensorOutline],
        receivers: int,
        timeout: float,
        piece: int,
        places: Collection[str],
        groups: Groups,
        device: torch.device,
    ) -> None:
        """Listen at `host`, which receivers reach.

        places: where ranks have buffers, for receivers of way ipc. groups: of way nccl.
        """
        self._listener = listen_at(host, backlog=receivers + 16)
        self._places, self._groups, self._device = places, groups, device
        self.offer = TransferOffer(
            way=way,
            host=host,
            port=self._listener.getsockname()[1],
            token=secrets.token_hex(16),
            version=version,
            receivers=receivers,
            timeout=timeout,
            piece=piece,
            tensors=dict(tensors),
        )
        self._receivers: list[_Receiver] = []
        self._expected = receivers  # that may still be let in
        self._work: Any = None  # the broadcast under way
        self._number = -1  # of the piece sent last
        self._until = self._began = 0.0
        self._why = ""  # the first receiver's failure

    def admit(self) -> tuple[str, ...]:
        """Wait for the receivers; their places. After the timeout, or when all are there."""
        until = time.monotonic() + self.offer.timeout
        strangers: list[Line] = []
        with self._listener:
            while len(self._receivers) < self._expected and time.monotonic() < until:
                numbers = ready([self._listener, *strangers], until)
                for line in [each for each in strangers if each.fileno() in numbers]:
                    if self._let_in(line, until):
                        strangers.remove(line)
                if self._listener.fileno() in numbers:
                    connection, address = self._listener.accept()
                    strangers.append(Line(connection, f"the receiver at {address[0]}"))
        for line in strangers:
            line.close()
        if missing := self._expected - len(self._receivers):
            self._missed(f"{missing} of {self.offer.receivers} did not come in time")
        return tuple(each.place for each in self._receivers)

    def begin(self, handles: Mapping[str, dict[str, Any]]) -> None:
        """Tell the receivers that it begins; handles: of the buffers of way ipc, by place."""
        self._began = time.monotonic()
        self._until = self._began + self.offer.timeout
        if self.offer.way == "ipc":
            for each in list(self._receivers):
                self._tell(each, {"buffers": handles[each.place]})
            return
        try:
            self._meet()
        except (TransferFailed, OSError, RuntimeError) as error:
            self._fail_all(str(error))

    def sent(self) -> None:
        """Return once nobody needs the piece sent before, or has failed."""
        if self._work is not None:
            work, self._work = self._work, None
            group = self._groups.group
            if group is None:
                return
            try:
                group.wait(work, self._until, self._check)
            except TransferFailed as error:
                self._fail_all(str(error))
        elif self.offer.way == "ipc" and self._number >= 0:
            for each in list(self._receivers):
                self._hear(each, {"taken": self._number})

    def send(self, piece: Tensor | None) -> None:
        """Begin to send the next piece, which stays as it is until `sent`.

        None: of way ipc, where buffers are other ranks'.
        """
        self._number += 1
        if self.offer.way == "ipc":
            for each in list(self._receivers):
                self._tell(each, {"piece": self._number})
        elif self._groups.group is not None and self._receivers:
            assert piece is not None, "rank 0 broadcasts"
            try:
                self._work = self._groups.group.broadcast(piece)
            except TransferFailed as error:
                self._fail_all(str(error))

    @property
    def over(self) -> bool:
        """Whether nobody is left who receives."""
        return not self._receivers

    def finish(self) -> TransferReport:
        """Wait until the receivers have all, and let them go."""
        self.sent()
        for each in list(self._receivers):
            self._hear(each, {"done": True})
        served = len(self._receivers)
        self.close()
        return TransferReport(
            receivers=self.offer.receivers,
            served=served,
            seconds=time.monotonic() - self._began if self._began else 0.0,
            why=self._why,
        )

    def close(self) -> None:
        """End it; who still waits loads from the store."""
        self._listener.close()
        for each in self._receivers:
            each.line.close()
        self._receivers = []
        if self._work is not None:
            self._work = None
            self._groups.abandon()

    def _let_in(self, line: Line, until: float) -> bool:
        """Whether a line is dealt with."""
        try:
            message = line.arrived()
            if message is None:
                return False
            token = str(message.get("token"))
            if not hmac.compare_digest(token.encode(), self.offer.token.encode()):
                raise TransferFailed(f"{line.name} is none of this transfer")
            names = (str(message.get(name)) for name in ("member", "group", "place"))
            receiver = _Receiver(line, *names)
            if self.offer.way == "ipc" and receiver.place not in self._places:
                why = "it is on another device or machine than the trainer"
                self._missed(f"{line.name}: {why}")
                line.send({"refused": why}, until)
                line.close()
                self._expected -= 1
                return True
        except TransferFailed:
            line.close()
            return True
        self._receivers.append(receiver)
        return True

    def _meet(self) -> None:
        """Have rank 0 and all receivers in one group."""
        if self._groups.fits(self._receivers):
            for each in list(self._receivers):
                self._tell(each, {"group": each.group})
            return
        self._groups.abandon()
        store, port = open_meeting_point(self.offer.host, self.offer.timeout)
        seat = Seat(
            group=uuid.uuid4().hex,
            rank=0,
            size=len(self._receivers) + 1,
            host=self.offer.host,
            port=port,
        )
        for rank, each in enumerate(list(self._receivers), 1):
            self._tell(each, {"group": seat.group, "rank": rank, "size": seat.size, "port": port})
        left = self._until - time.monotonic()
        if self._receivers:
            self._groups.group = BroadcastGroup(seat, self._device, left, store)
            self._groups.members = frozenset(each.member for each in self._receivers)

    def _check(self) -> None:
        """Raise TransferFailed where a receiver has given up."""
        for each in self._receivers:
            message = each.line.arrived()
            if message is not None and "failed" in message:
                raise TransferFailed(f"{each.line.name}: {message['failed']}")

    def _tell(self, receiver: _Receiver, message: Mapping[str, Any]) -> None:
        try:
            receiver.line.send(message, self._until)
        except TransferFailed as error:
            self._fail(receiver, str(error))

    def _hear(self, receiver: _Receiver, expected: Mapping[str, Any]) -> None:
        """Wait for what a receiver has to say, or let it go."""
        try:
            message = receiver.line.receive(self._until)
            if message != expected:
                raise TransferFailed(f"{receiver.line.name}: {message.get('failed', message)}")
        except TransferFailed as error:
            self._fail(receiver, str(error))

    def _fail(self, receiver: _Receiver, why: str) -> None:
        """Let a receiver go: of a broadcast none gets what not all get."""
        self._missed(why)
        if self.offer.way == "nccl":
            self._fail_all(why)
            return
        receiver.line.close()
        self._receivers.remove(receiver)

    def _fail_all(self, why: str) -> None:
        self._missed(why)
        for each in self._receivers:
            each.line.close()
        self._receivers = []
        self._work = None
        self._groups.abandon()

    def _missed(self, why: str) -> None:
        self._why = self._why or why
