"""What people read of a run's guards and of its way back, as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.markdown import cell, code, escaped

if TYPE_CHECKING:
    from storage.runs.commit_log import Commit, GuardRecord
    from storage.runs.live import End
    from storage.runs.origins import Origin

DOES = {"warn": "warns", "synchronous": "ends the overlap of steps", "stop": "stops the run"}


def guard_table(commit: Commit) -> list[str]:
    """Markdown lines: what every guard of the run found in a step; none where it has none."""
    if not commit.guards:
        return []
    lines = ["", "#### Guards", "", "| guard | metric | value | bound | beyond, steps in a row | |"]
    lines.append("|---|---|---|---|---|---|")
    for one in commit.guards:
        value, bound = _shown(one.value), _shown(one.threshold)
        lines.append(
            f"| {escaped(one.guard)} | {cell(one.metric)} | {value} | {bound} "
            f"| {one.beyond} | {_does(one)} |"
        )
    return lines


def went_back(origin: Origin) -> list[str]:
    """Markdown lines of a run that began as the way back of another one."""
    back = origin.rollback
    if back is None:
        return []
    changes = f" with {', '.join(map(code, back.change))}" if back.change else ""
    return [
        f"- Rollback {back.number}: **{escaped(back.run)}** went back to step {origin.at} after "
        f"its step {back.after}, and this run goes on from there{changes}. {escaped(back.why)}"
    ]


def continued(end: End | None) -> list[str]:
    """Markdown lines of a run that ended by going back."""
    if end is None or end.rolled_back is None:
        return []
    back = end.rolled_back
    return [
        f"- **Rolled back to step {back.to} by {escaped(back.guard)}, continued as "
        f"{escaped(back.child)}.** {escaped(back.why)}"
    ]


def _does(record: GuardRecord) -> str:
    if record.action == "rollback":
        changes = "".join(f", {cell(word)}" for word in record.change)
        return f"**goes back to step {record.back_to}{changes}**"
    return "" if record.action is None else f"**{DOES[record.action]}**"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
