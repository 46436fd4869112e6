"""The rows of a run's data that leave the draw, as an answer on the command line."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from configs.environment import user
from storage.rows.readmissions import Readmission, ask, between, listed
from storage.rows.row_history import REASONS, RowHistory
from storage.runs.commit_log import head, read_commit
from storage.runs.live import goes_on_as
from storage.runs.run_store import RunStore, committer, start_of
from tasks.commands.command import Answer, Request, heading, table, text
from tasks.quarantine.row_histories import HISTORY
from tasks.run.run_record import settings_of

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantinedRow:
    """A row that is not drawn."""

    row: int  # number in the data
    reason: str
    since: int  # step that put it there
    draws: int
    reward: float | None  # mean over its draws; None: none was scored
    failures: int  # draws in a row with a failed sample
    uniform: int  # draws in a row without variance
    tokens: float  # of a sample, mean of its last draw
    waits: bool  # whether a request lets it in at the next draw


def answer(request: Request) -> Answer:
    """Show the rows in quarantine or, with --readmit, leave a request to let some in again."""
    files, asked = goes_on_as(request.files), request.arguments
    if settings_of(files).data.quarantine is None:
        raise ValueError(
            f"Run {files.run} has no quarantine: data.quarantine is null. Set it for a new run, or "
            "on resuming, such as data.quarantine.failures=3."
        )
    if asked.readmit is not None:
        ask(files, Readmission(rows=rows_of(files, asked.readmit), by=user()))
    rows, requests = quarantined(files), listed(files)
    record = {
        "run": files.run,
        "rows": [asdict(one) for one in rows],
        "requests": [one.model_dump(mode="json") for one in requests],
    }
    shown = [heading(f"{len(rows)} rows in quarantine after step {_head(files)} of {files.run}")]
    shown += [_table(rows[: asked.limit])] if rows else []
    if len(rows) > asked.limit:
        shown.append(text(f"{len(rows) - asked.limit} more; --limit shows them."))
    if waiting := sum(one.waits for one in rows):
        shown.append(text(f"{waiting} of them are let in at the run's next draw."))
    return Answer(record=record, shown=shown)


def rows_of(files: RunStore, words: str) -> list[int] | None:
    """The rows that --readmit names; None: all. Raises ValueError for one that is drawn anyway."""
    if words == "all":
        return None
    parts = words.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--readmit {words} names no rows. Give numbers, such as 3,17, or all.")
    rows = sorted({int(part) for part in parts})
    known = {one.row for one in quarantined(files)}
    if unknown := [row for row in rows if row not in known]:
        raise ValueError(
            f"Row {unknown[0]} is not in quarantine in run {files.run}. Give numbers that "
            f"refrain quarantine {files.run} shows, or all."
        )
    return rows


def quarantined(files: RunStore) -> list[QuarantinedRow]:
    """The rows that the run's last commit keeps out of the draw, in the order in which they came."""
    step = _head(files)
    if step == 0:
        return []
    owner, number = committer(files, step)
    commit = read_commit(owner, number)
    found = RowHistory.read(files.store, commit.refs.get(HISTORY))
    seen = commit.readmissions if owner.run == files.run else 0
    again = between(files, seen, len(listed(files)))
    rows = []
    for at in np.lexsort((found.prompt_row, found.since))[
        (np.sort(found.since) == 0).sum() :
    ].tolist():
        scored, row = int(found.scored[at]), int(found.prompt_row[at])
        rows.append(
            QuarantinedRow(
                row=row,
                reason=REASONS[found.reason[at]],
                since=int(found.since[at]),
                draws=int(found.draws[at]),
                reward=float(found.reward_sum[at]) / scored if scored else None,
                failures=int(found.failures[at]),
                uniform=int(found.uniform[at]),
                tokens=float(found.tokens[at]),
                waits=again is None or row in again,
            )
        )
    return rows


def _head(files: RunStore) -> int:
    return head(files) or start_of(files)


def _table(rows: list[QuarantinedRow]) -> RenderableType:
    names = ("row", "draws", "mean reward", "since step", "failures", "no variance", "tokens")
    made = table("row", "reason", *names[1:], "", right=names)
    for one in rows:
        reward = "-" if one.reward is None else f"{one.reward:.3f}"
        numbers = (one.draws, reward, one.since, one.failures, one.uniform, f"{one.tokens:.0f}")
        made.add_row(str(one.row), one.reason, *map(str, numbers), "let in" if one.waits else "")
    return made
