"""A person's terminal: lines that stay, and below them what is happening now."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from configs.terminal_text import terminal_text
from tasks.reporting.output import drop_output
from tasks.reporting.safe_console import SafeConsole
from tasks.run.run_log import LINES

REFRESHES = 4  # a second


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
        self._live: Live | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def live(self, shown: Callable[[], RenderableType]) -> Iterator[None]:
        """During the body, keep below the lines what `shown` gives several times a second.

        Within another such body nothing is new.
        """
        console = self.console
        if not console.is_terminal or console.is_dumb_terminal or self.is_live:
            yield
            return
        self._live = Live(
            get_renderable=shown,
            console=console,
            refresh_per_second=REFRESHES,
            transient=True,
            vertical_overflow="crop",
        )
        self._live.start(refresh=True)
        try:
            yield
        finally:
            self.end_live()

    def end_live(self) -> None:
        """Leave the lines alone, and the cursor as it was, also before the body has ended."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    @property
    def is_live(self) -> bool:
        """Whether a person sees what is happening now."""
        return self._live is not None

    @property
    def width(self) -> int | None:
        """Characters of a line of a terminal; None where there is none."""
        return self.console.width if self.console.is_terminal else None

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
