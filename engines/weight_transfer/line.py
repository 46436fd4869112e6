"""Messages of a transfer: JSON over a connection, of which no wait is without an end."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from engines.weight_transfer.offer import TransferFailed

HEAD = 4  # bytes, the length of what follows
LONGEST = 2**20  # bytes of a message


class HasFileno(Protocol):
    """A socket, or what has one."""

    def fileno(self) -> int: ...


class Line:
    """One end of a connection between a trainer's rank 0 and a receiver.

    Every method raises TransferFailed where the other end is gone or says something else.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        """`name`: of the other end, for messages."""
        self._connection = connection
        self._connection.setblocking(False)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._arrived = bytearray()
        self.name = name

    def fileno(self) -> int:
        """For `select`."""
        return self._connection.fileno()

    def send(self, message: Mapping[str, Any], until: float) -> None:
        """`until`: by time.monotonic."""
        text = json.dumps(message).encode()
        data = memoryview(len(text).to_bytes(HEAD, "big") + text)
        while data:
            try:
                data = data[self._connection.send(data) :]
            except BlockingIOError:
                self._wait(until, write=True)
            except OSError as error:
                raise TransferFailed(f"{self.name} is gone: {error}") from error

    def receive(self, until: float) -> dict[str, Any]:
        """The next message; TransferFailed where none comes in time."""
        while (message := self.arrived()) is None:
            self._wait(until, write=False)
        return message

    def arrived(self) -> dict[str, Any] | None:
        """The next message, if it is there."""
        message = self._whole()
        while message is None:
            try:
                data = self._connection.recv(2**16)
            except BlockingIOError:
                return None
            except OSError as error:
                raise TransferFailed(f"{self.name} is gone: {error}") from error
            if not data:
                raise TransferFailed(f"{self.name} is gone: its connection ended")
            self._arrived += data
            message = self._whole()
        return message

    def close(self) -> None:
        """May be called again."""
        self._connection.close()

    def _whole(self) -> dict[str, Any] | None:
        if len(self._arrived) < HEAD:
            return None
        size = int.from_bytes(self._arrived[:HEAD], "big")
        if size > LONGEST:
            raise TransferFailed(f"{self.name} sends no message of a transfer")
        if len(self._arrived) < HEAD + size:
            return None
        text = bytes(self._arrived[HEAD : HEAD + size])
        del self._arrived[: HEAD + size]
        try:
            message = json.loads(text)
        except ValueError as error:
            raise TransferFailed(f"{self.name} sends no message of a transfer") from error
        if not isinstance(message, dict):
            raise TransferFailed(f"{self.name} sends no message of a transfer")
        return message

    def _wait(self, until: float, write: bool) -> None:
        if not ready([self], until, write=write):
            raise TransferFailed(f"{self.name} did not answer in time")


def ready(ends: Iterable[HasFileno], until: float, *, write: bool = False) -> set[int]:
    """File numbers of the ends at which there is something to read, or room to write, by then."""
    poll = select.poll()  # which knows numbers past 1,024
    for end in ends:
        poll.register(end.fileno(), select.POLLOUT if write else select.POLLIN)
    left = max(0.0, until - time.monotonic())
    return {number for number, _ in poll.poll(1000 * left)}


def connect(host: str, port: int, name: str, timeout: float) -> Line:
    """A line to who listens there."""
    try:
        connection = socket.create_connection((host, port), timeout)
    except OSError as error:
        raise TransferFailed(f"{name} is not reached at {host}:{port}: {error}") from error
    return Line(connection, name)
