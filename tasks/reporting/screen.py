"""What stands at the bottom of a terminal while a run works: its phases, and the time left."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from configs.terminal_text import terminal_text
from storage.runs.live import Phase, Progress

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
    doing, left = progress.doing, progress.seconds_left
    return progress.model_copy(
        update={
            "doing": doing and _older(doing, seconds),
            "phases": tuple(_older(phase, seconds) for phase in progress.phases),
            "seconds_left": None if left is None else max(left - seconds, 0.0),
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
