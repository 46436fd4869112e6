"""A person's terminal: lines that stay, and a line that says what is happening now."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status
from rich.text import Text

from configs.terminal_text import terminal_text
from tasks.reporting.output import drop_output
from tasks.reporting.safe_console import SafeConsole
from tasks.run.run_log import LINES


class Lines(SafeConsole):
    """Standard output; standard error once nobody reads it any more, as after `| head`.

    A run goes on, and what it says is not lost.
    """

    def on_broken_pipe(self) -> None:
        """Rich would end the program."""
        drop_output()
        self.file = sys.stderr
        self.print("Nobody reads standard output any more; what is printed goes here.")


class Terminal:
    """Progress for a person. Without a terminal (a log file, CI) only lasting lines are printed."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Lines(soft_wrap=True)
        self._status: Status | None = None
        self._lock = threading.Lock()
        self._since = time.monotonic()

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """Keep the live line on screen during the body; within another such body nothing is new."""
        if not self.console.is_terminal or self.is_live:
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
                self._status.update(Text(terminal_text(text)))

    def say(self, text: str, style: str = "", shown: str | None = None) -> None:
        """Print a line that stays; `shown` in its place on a terminal, and in no log."""
        with self._lock:
            terminal = shown is not None and self.console.is_terminal
            line = terminal_text(shown if terminal and shown is not None else text)
            self.console.print(Text(line, style=style))
        LINES.info("%s", text)

    def facts(self, title: str, lines: dict[str, str]) -> None:
        """Print a title and a block of name: value lines."""
        self.say(title, style="bold")
        width = max(len(name) for name in lines)
        for name, value in lines.items():
            self.say(f"  {name:<{width}}  {value}")
