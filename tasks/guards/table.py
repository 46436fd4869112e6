"""What a step's note on the dashboard says of guards, as Markdown."""

from __future__ import annotations

from storage.runs.commit_log import Commit, GuardRecord
from tasks.markdown import cell, escaped

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


def _does(record: GuardRecord) -> str:
    if record.action == "rollback":
        changes = "".join(f", {cell(word)}" for word in record.change)
        return f"**goes back to step {record.back_to}{changes}**"
    return "" if record.action is None else f"**{DOES[record.action]}**"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
