"""A person's terminal: lines that stay, and below them what is happening now; text of any origin."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from configs.terminal_text import terminal_text
from storage.runs.live import Phase, Progress
from tasks.reporting.output import drop_output
from tasks.run.run_log import LINES


class SafeConsole(Console):
    """Prints what it is given and obeys none of it: no markup, and no control characters.

    So a table's cells and titles may hold names and text of others as they are.
    """

    def __init__(self, *, width: int | None = None, soft_wrap: bool = False) -> None:
        super().__init__(
            width=width, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False
        )

    def render_str(self, text: str, **how: Any) -> Text:
        """Text of a str, which a table's cells may be."""
        return super().render_str(terminal_text(text), **{**how, "markup": False, "emoji": False})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Each text passes here, also one within a table, before it is laid out."""
        if isinstance(renderable, Text) and terminal_text(renderable.plain) != renderable.plain:
            renderable = renderable.blank_copy(terminal_text(renderable.plain))
        return super().render(renderable, options)


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
    def live(self, render: Callable[[], RenderableType]) -> Iterator[None]:
        """During the body, keep below the lines what `render` gives several times a second.

        Within another such body nothing is new.
        """
        console = self.console
        if not console.is_terminal or console.is_dumb_terminal or self.is_live:
            yield
            return
        self._live = Live(
            get_renderable=render,
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


MOST = 8  # phases that are shown
NAME, BAR, TIME = 17, 12, 10  # characters of columns


def screen(progress: Progress) -> RenderableType:
    """A line on the run, then one for each phase; none is wrapped, whatever the width."""
    rows: list[RenderableType] = [_line(headline(progress), "bold")]
    if progress.phases:
        rows.append(_table(progress.phases[:MOST]))
    return Group(*rows)


def headline(progress: Progress) -> str:
    """Where the run is, and for how long it goes on."""
    parts = []
    if progress.step:
        parts.append(f"step {progress.step}" + (f"/{progress.steps}" if progress.steps else ""))
    if progress.doing is not None:
        parts.append(f"{progress.doing.name} · {duration(progress.doing.seconds)}")
    if progress.seconds_left:
        parts.append(f"{duration(progress.seconds_left)} left")
    return " · ".join(parts) or "starting"


def plain(progress: Progress) -> str:
    """The same in one line, for where there is no terminal."""
    return " · ".join([headline(progress), *map(_told, progress.phases)])


def aged(progress: Progress, seconds: float) -> Progress:
    """What was said so many seconds ago, as it would be now if nothing but time had passed."""
    doing, seconds_left = progress.doing, progress.seconds_left
    return progress.model_copy(
        update={
            "doing": doing and _older(doing, seconds),
            "phases": tuple(_older(phase, seconds) for phase in progress.phases),
            "seconds_left": None if seconds_left is None else max(seconds_left - seconds, 0.0),
        }
    )


def duration(seconds: float) -> str:
    """A time for people, in two units at most."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole < 600 else f"{whole // 60} min"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _older(phase: Phase, seconds: float) -> Phase:
    return phase.model_copy(update={"seconds": phase.seconds + seconds})


def _table(phases: tuple[Phase, ...]) -> Table:
    rows = Table.grid(padding=(0, 1), expand=True)
    for width in (NAME, BAR, TIME):  # at least, so that columns stay where they are
        rows.add_column(no_wrap=True, min_width=width)
    rows.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for phase in phases:
        bar = ProgressBar(total=phase.total, completed=phase.done or 0, width=BAR)
        rows.add_row(
            _line(f"  {phase.name}"),
            bar if phase.total else "",
            _line(duration(phase.seconds), "dim"),
            _line(", ".join(filter(None, (_count(phase), phase.note)))),
        )
    return rows


def _told(phase: Phase) -> str:
    parts = filter(None, (_count(phase), phase.note, duration(phase.seconds)))
    return f"{phase.name} {', '.join(parts)}"


def _count(phase: Phase) -> str:
    return f"{phase.done}/{phase.total} {phase.unit}".rstrip() if phase.total else ""


def _line(text: str, style: str = "") -> Text:
    return Text(terminal_text(text), style=style, no_wrap=True, overflow="ellipsis")
