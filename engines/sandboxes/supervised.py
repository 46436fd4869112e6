"""The owner's side of a sandbox: a command that starts its first process, and orders to that process.

The first process is Python, in the sandbox, and gets the modules that it needs as text through its
standard input: nothing of this program has to be visible there.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from configs.rewards import GRACE, SandboxLimits
from engines.sandboxes.protocol import Executed, SandboxFailed, framed, received

END_SECONDS = 5.0  # in which a sandbox ends by itself when its owner leaves
_SAID = 500  # characters of an error output that are repeated

# What runs in the sandbox, in the order in which it is loaded.
MODULES = (
    "engines.processes.parent_death",
    "engines.sandboxes.protocol",
    "engines.sandboxes.system_calls",
    "engines.sandboxes.supervisor",
    "engines.sandboxes.namespaces",
)
LOADER = """
import json, os, sys, types
def message():
    def exactly(size):
        data = b""
        while len(data) < size:
            piece = os.read(0, size - len(data))
            if not piece:
                os._exit(1)
            data += piece
        return data
    return json.loads(exactly(int.from_bytes(exactly(4), "big")))
first = message()
for name, text in first["modules"].items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
sys.modules[first["main"]].main(first["setup"])
"""


@cache
def _sources() -> dict[str, str]:
    found = {}
    for name in MODULES:
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None, name
        found[name] = Path(spec.origin).read_text()
    return found


class SupervisedSandbox:
    """A `Sandbox` (engines/sandboxes/protocol.py) behind a command. A context; or close it."""

    def __init__(
        self,
        command: Sequence[str],
        main: str,
        setup: Mapping[str, Any],
        limits: SandboxLimits,
        start_seconds: float,
        remove: Callable[[], None] | None = None,
    ) -> None:
        """Start it. SandboxFailed, with what the command said, when it is not ready in time.

        Args:
            command: starts Python in the sandbox; LOADER and arguments of Python stand at its end.
            main: of MODULES, the one whose `main` is called there.
            setup: its argument, besides the limits.
            limits: of each program.
            start_seconds: deadline of the start.
            remove: called once at the end; cleans up where the end of the command does not.
        """
        self._limits = limits
        self._remove = remove
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as this object)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                bufsize=0,
                # Of its own file system, which nobody else reaches; programs may be another user.
                umask=0o022,
                cwd=tempfile.gettempdir(),  # Podman leaves a file there when memory runs out
            )
        except OSError as error:
            self.close()
            raise SandboxFailed(f"{command[0]} cannot be started: {error.strerror}") from None
        numbers = limits.model_dump(include=set(SandboxLimits.model_fields))
        first = {
            "modules": _sources(),
            "main": main,
            "setup": {"user": None, "ours": 1, **setup, "limits": numbers},
        }
        self._ask(first, start_seconds)

    def write(self, path: str, data: bytes) -> None:
        """As `Sandbox.write`."""
        self._ask({"do": "write", "path": path, "data": _text(data)}, self._limits.timeout)

    def exec(
        self, argv: Sequence[str], stdin: bytes = b"", timeout: float | None = None
    ) -> Executed:
        """As `Sandbox.exec`."""
        seconds = self._limits.timeout if timeout is None else timeout
        order = {"do": "exec", "argv": list(argv), "stdin": _text(stdin), "timeout": seconds}
        answer = self._ask(order, seconds)
        for name in ("stdout", "stderr"):
            answer[name] = base64.b64decode(answer[name])
        return Executed(**answer)

    def read(self, path: str, limit: int) -> bytes:
        """As `Sandbox.read`."""
        order = {"do": "read", "path": path, "limit": limit}
        return base64.b64decode(self._ask(order, self._limits.timeout)["data"])

    def close(self) -> None:
        """As `Sandbox.close`; may be called again."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(END_SECONDS)  # with it all of the sandbox has ended
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self._said.close()
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()

    def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a message. ValueError if it was refused; SandboxFailed, and it is over."""
        process = self._process
        if process is None:
            raise SandboxFailed("The sandbox has been closed.")
        assert process.stdin is not None and process.stdout is not None
        give_up = time.monotonic() + seconds + GRACE
        try:
            _send(process.stdin.fileno(), framed(message), give_up)
            answer = received(lambda size: _read(process.stdout.fileno(), size, give_up))  # type: ignore[union-attr]
        except TimeoutError:
            raise self._lost(f"The sandbox did not answer within {seconds + GRACE:g} s") from None
        except (EOFError, OSError, json.JSONDecodeError):
            raise self._lost("The sandbox has ended") from None
        if "refused" in answer:
            raise ValueError(answer["refused"])
        if "failed" in answer:
            raise self._lost(f"The sandbox failed: {answer['failed']}")
        return answer

    def _lost(self, text: str) -> SandboxFailed:
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
        self._said.seek(0)
        said = " ".join(self._said.read(10 * _SAID).decode(errors="replace").split())[-_SAID:]
        self.close()
        return SandboxFailed(f"{text}. {said}".rstrip() if said else f"{text}.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _wait(descriptor: int, event: int, give_up: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(give_up - time.monotonic(), 0) * 1000):
        raise TimeoutError


def _send(descriptor: int, data: bytes, give_up: float) -> None:
    rest = memoryview(data)
    os.set_blocking(descriptor, False)
    while rest:
        _wait(descriptor, select.POLLOUT, give_up)
        with contextlib.suppress(BlockingIOError):
            rest = rest[os.write(descriptor, rest) :]


def _read(descriptor: int, size: int, give_up: float) -> bytes:
    _wait(descriptor, select.POLLIN, give_up)
    return os.read(descriptor, size)
