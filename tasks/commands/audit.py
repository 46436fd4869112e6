"""The audit of a run as an answer on the command line."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from configs.terminal_text import bytes_text
from engines.meanings import MeaningChange, changes, meanings_of
from storage.audit.audit import Audit, audit
from storage.runs.commit_log import read_outline
from storage.runs.run_store import RunStore, start_of
from tasks.commands.command import Answer, Request, heading, table, text
from tasks.run.run_record import stored_settings

if TYPE_CHECKING:
    from rich.console import RenderableType

SHOWN = 20  # orphans named on the terminal; --json has all


def answer(request: Request) -> Answer:
    """Audit the run that was named."""
    result = audit(request.files)
    orphans = bool(result.orphans) and request.arguments.strict
    lines = _shown(result)
    older = _older_meanings(request.files) if result.good and result.steps else []
    if older:
        lines.append(
            text(
                f"Since its first steps the meaning of {' and '.join(map(str, older))} has changed. "
                "Their rewards stand as they were given; refrain rescore says what they would be now."
            )
        )
    record = _record(result) | {"older_meanings": [asdict(meaning) for meaning in older]}
    return Answer(record=record, shown=lines, good=result.good and not orphans)


def _older_meanings(files: RunStore) -> list[MeaningChange]:
    """What scored the run's own first step, and means something else in this Refrain."""
    first = read_outline(files, start_of(files) + 1)
    return changes(first.meanings, meanings_of(stored_settings(files)))


def _record(result: Audit) -> dict[str, object]:
    return {
        "run": result.run,
        "origin": result.origin,
        "good": result.good,
        "steps": [asdict(totals) for totals in result.steps],
        "problems": [asdict(problem) for problem in result.problems],
        "orphans": result.orphans,
        "unfinished": result.unfinished,
        "removed_by_retention": result.removed,
        "versions": result.versions,
        "snapshots": result.snapshots,
        "evaluations": result.evaluations,
        "objects_read": result.read.objects,
        "bytes_read": result.read.nbytes,
    }


def _shown(result: Audit) -> list[RenderableType]:
    numbers = ("drawn", "trained", "filtered", "dropped", "in flight")
    ledger = table("step", *numbers, "recounted", right=("step", *numbers))
    for row in result.steps:
        dropped = ", ".join(f"{count} {reason}" for reason, count in row.dropped.items()) or "0"
        counts = (row.step, row.drawn, row.trained, row.filtered, dropped, row.in_flight)
        why = "removed by retention" if row.step in result.without else "gone or damaged"
        ledger.add_row(*map(str, counts), "yes" if row.recounted else f"no: batches are {why}")
    title = "Prompts at every commit: drawn = trained + filtered + dropped + in flight"
    lines: list[RenderableType] = [heading(f"{result.run}. {title}"), ledger]
    if result.problems:
        problems = table("problem", "step", "")
        for problem in result.problems:
            step = "" if problem.step is None else str(problem.step)
            problems.add_row(problem.kind, step, text(problem.message))
        lines.append(problems)
    if result.orphans:
        lines.append(text(f"{len(result.orphans)} orphan(s), which nothing names:", "bold"))
        lines += [text(f"  {key}") for key in result.orphans[:SHOWN]]
        if len(result.orphans) > SHOWN:
            lines.append(text(f"  and {len(result.orphans) - SHOWN} more (--json names all)"))
    facts = [
        f"{len(result.steps)} commits in an unbroken chain" if result.good else "",
        f"which goes on from {result.origin}" if result.good and result.origin else "",
        f"{result.versions} policy versions and {result.snapshots} trainer snapshots",
        f"{result.evaluations} evaluations" if result.evaluations else "",
        f"{result.read.objects} objects ({bytes_text(result.read.nbytes)}) read and compared",
        f"{result.removed} batch objects removed by retention (store.keep_steps)"
        if result.removed
        else "",
        f"{len(result.unfinished)} objects of a step under way" if result.unfinished else "",
        f"{len(result.orphans)} orphan(s)",
    ]
    lines.append(text("; ".join(fact for fact in facts if fact) + "."))
    count = len(result.problems)
    verdict = f"{count} problem{'s' * (count > 1)} found." if count else "All is good."
    lines.append(text(verdict, "bold green" if result.good else "bold red"))
    return lines
