"""What a sandbox is, for those who run code in one, and what both sides of it say to each other.

A program that misbehaves is a result: it timed out, it was killed. What the machine did not do, such
as a sandbox that cannot be started, is SandboxFailed and nobody's score.

Only the standard library is imported: the inner side is loaded in the sandbox too, where there is
nothing else (engines/sandboxes/opening.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

WORK = "/tmp/work"  # working folder of programs; a relative path begins there
NUMBER = 4  # bytes of a message's length

Cause = Literal["ended", "timed_out", "out_of_memory", "killed"]


class SandboxFailed(RuntimeError):
    """The sandbox could not do its work; no program is to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """How a program ended. Nothing that it started lives on.

    A program that printed and divided by zero: cause "ended", exit_code 1, signal None.
    """

    cause: Cause  # "killed": by a signal that the sandbox did not send
    exit_code: int | None  # None unless it ended by itself
    signal: int | None  # that ended it
    stdout: bytes
    stderr: bytes
    truncated: bool  # whether there was more output than was kept
    seconds: float  # of the clock


class Sandbox(Protocol):
    """A place where a program finds its own files and nothing else. Used by one thread at a time."""

    def write(self, path: str, data: bytes) -> None:
        """Write a file below the working folder, and the folders on its way.

        ValueError where the path leads elsewhere or the sandbox has no room for it.
        """

    def exec(
        self, argv: Sequence[str], stdin: bytes = b"", timeout: float | None = None
    ) -> Executed:
        """Run a program to its end; `timeout` in seconds, that of the settings if None.

        Files that it wrote are there for the next one; its processes are not.
        """

    def read(self, path: str, limit: int) -> bytes:
        """The first `limit` bytes of a file below the working folder; ValueError if there is none."""

    def close(self) -> None:
        """End it and remove all that was in it."""


def framed(message: dict[str, Any]) -> bytes:
    """A message as it is sent: its length, then JSON."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(NUMBER, "big") + body


def received(read: Callable[[int], bytes]) -> dict[str, Any]:
    """The next message; EOFError when the other side is gone.

    `read`: gives at least one byte and at most so many, or none at the end.
    """

    def exactly(size: int) -> bytes:
        parts = []
        while size:
            part = read(size)
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    message: dict[str, Any] = json.loads(exactly(int.from_bytes(exactly(NUMBER), "big")))
    return message


def send(descriptor: int, message: dict[str, Any]) -> None:
    """Write a message to a file descriptor."""
    data = memoryview(framed(message))
    while data:
        data = data[os.write(descriptor, data) :]
