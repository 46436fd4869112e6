"""Programs in a real terminal, whose screen is read as a person reads it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyte


class ProgramOnScreen:
    """A program in a pseudo-terminal of its own, and what it shows there."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        columns: int = 80,
        rows: int = 24,
    ) -> None:
        self.raw = b""  # all that it wrote
        self.screen = pyte.HistoryScreen(columns, rows, history=1000, ratio=0.5)
        self._stream, self._lock = pyte.ByteStream(self.screen), threading.Lock()
        self._terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        variables = {**environment, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES"):
            variables.pop(name, None)
        self.process = subprocess.Popen(
            list(words),
            cwd=folder,
            env=variables,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO once nobody has the other end
            while data := os.read(self._terminal, 65536):
                with self._lock:
                    self.raw += data
                    self._stream.feed(data)

    @property
    def lines(self) -> list[str]:
        """The screen now, without what is blank at the end of lines and below them."""
        with self._lock:
            found = [line.rstrip() for line in self.screen.display]
        while found and not found[-1]:
            found.pop()
        return found

    @property
    def everything(self) -> list[str]:
        """The same with what has left the screen at its top."""
        with self._lock:
            above = [
                "".join(row[column].data for column in range(self.screen.columns)).rstrip()
                for row in self.screen.history.top
            ]
        return [*above, *self.lines]

    def until(
        self, right: Callable[[list[str]], bool], timeout: float = 300, every: float = 0.05
    ) -> list[str]:
        """The first screen that is right; AssertionError with the last one where none is."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            lines = self.lines
            if right(lines):
                return lines
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(every)
        raise AssertionError("\n".join(["the screen was never right:", *self.everything]))

    def press_ctrl_c(self) -> None:
        """As a person does: the terminal sends SIGINT to what runs in its foreground."""
        os.write(self._terminal, b"\x03")

    def end(self, timeout: float = 300) -> int:
        """Its exit code, once all that it wrote is on the screen."""
        code = self.process.wait(timeout)
        self._reader.join(10)
        return code


def _take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextlib.contextmanager
def on_screen(
    words: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[ProgramOnScreen]:
    """A program for a body; what still runs at its end is killed."""
    program = ProgramOnScreen(words, folder, environment)
    try:
        yield program
    finally:
        if program.process.poll() is None:
            program.process.kill()
            program.process.wait()
