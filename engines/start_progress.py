"""What an engine that starts, or works on a call, is at: the phase, and when it last got on.

The engine says so by `report`, as often as it likes; the engine host listens, and the flow ends only
a start that has not got on for cluster.start_timeout. Without a listener a report is lost.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

LOOK = 1.0  # seconds between looks at what grows
TEXT = 200  # characters of a log's line in a phase

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


class StartProgress:
    """The progress of one start, or of another call."""

    def __init__(self) -> None:
        self.phase = ""  # as last reported
        self.at = time.monotonic()  # when it last changed

    def heard(self, phase: str) -> None:
        """Take a report; the same words again are no progress."""
        if phase != self.phase:
            self.phase, self.at = phase, time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since it last got on."""
        return time.monotonic() - self.at


@contextlib.contextmanager
def heard_by(listener: Callable[[str], None]) -> Iterator[None]:
    """Have `listener` called with each report of this thread's work in the body."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def current_listener() -> Callable[[str], None] | None:
    """Who takes the reports of this thread's work; None: nobody."""
    return _listener.get()


def report(phase: str) -> None:
    """Say what is being done, with a count that grows where it takes long: "12 of 339 tensors"."""
    listener = _listener.get()
    if listener is not None:
        listener(phase)


@contextlib.contextmanager
def reporting_growth(places: Sequence[Path], phase: str, log: Path | None = None) -> Iterator[None]:
    """Report how many bytes files or folders have, while the body waits for whoever writes them.

    `log`: one of those files, whose last line is reported too.
    """
    listener = _listener.get()
    if listener is None:
        yield
        return
    done = threading.Event()

    def look() -> None:
        while not done.wait(LOOK):
            said = "" if log is None else _last_line(log)
            size = sum(map(_bytes_at, places))
            listener(f"{phase}: {size} bytes" + (f', last "{said}"' if said else ""))

    listener(phase)
    watching = threading.Thread(target=look, name="progress", daemon=True)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()


def _bytes_at(path: Path) -> int:
    """Size of a file, or of all files below a folder; 0 where there is nothing yet."""
    files = path.rglob("*") if path.is_dir() else [path]
    total = 0
    for file in files:
        with contextlib.suppress(OSError):  # renamed or removed meanwhile
            if not file.is_symlink() and file.is_file():
                total += file.stat().st_size
    return total


def _last_line(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 4096, 0))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:TEXT]
