"""What a run says on the terminal: one live line while it works, one lasting line per step."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status
from rich.text import Text


class Terminal:
    """Progress for a person. Without a terminal (a log file, CI) only lasting lines are printed."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._lock = threading.Lock()
        self._since = time.monotonic()

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """Keep the live line on screen during the body."""
        if not self.console.is_terminal:
            yield
            return
        with self.console.status("starting") as status:
            self._status = status
            try:
                yield
            finally:
                self._status = None

    @property
    def is_live(self) -> bool:
        """Whether a person sees the live line."""
        return self._status is not None

    def doing(self, text: str) -> None:
        """Show what is happening now, in place of what was shown before."""
        with self._lock:
            if self._status is not None:
                self._status.update(Text(text))

    def say(self, text: str, style: str = "") -> None:
        """Print a line that stays."""
        with self._lock:
            self.console.print(Text(text, style=style))

    def facts(self, title: str, lines: dict[str, str]) -> None:
        """Print a title and a block of name: value lines."""
        self.say(title, style="bold")
        width = max(len(name) for name in lines)
        for name, value in lines.items():
            self.say(f"  {name:<{width}}  {value}")
