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
    found = audit(request.files)
    orphans = bool(found.orphans) and request.arguments.strict
    shown = _shown(found)
    older = _older_meanings(request.files) if found.good and found.steps else []
    if older:
        shown.append(
            text(
                f"Since its first steps the meaning of {' and '.join(map(str, older))} has changed. "
                "Their rewards stand as they were given; refrain rescore says what they would be now."
            )
        )
    record = _record(found) | {"older_meanings": [asdict(one) for one in older]}
    return Answer(record=record, shown=shown, good=found.good and not orphans)


def _older_meanings(files: RunStore) -> list[MeaningChange]:
    """What scored the run's own first step, and means something else in this Refrain."""
    first = read_outline(files, start_of(files) + 1)
    return changes(first.meanings, meanings_of(stored_settings(files)))


def _record(found: Audit) -> dict[str, object]:
    return {
        "run": found.run,
        "origin": found.origin,
        "good": found.good,
        "steps": [asdict(totals) for totals in found.steps],
        "problems": [asdict(problem) for problem in found.problems],
        "orphans": found.orphans,
        "unfinished": found.unfinished,
        "removed_by_retention": found.removed,
        "versions": found.versions,
        "snapshots": found.snapshots,
        "evaluations": found.evaluations,
        "objects_read": found.read.objects,
        "bytes_read": found.read.nbytes,
    }


def _shown(found: Audit) -> list[RenderableType]:
    numbers = ("drawn", "trained", "filtered", "dropped", "in flight")
    ledger = table("step", *numbers, "recounted", right=("step", *numbers))
    for one in found.steps:
        dropped = ", ".join(f"{count} {reason}" for reason, count in one.dropped.items()) or "0"
        counts = (one.step, one.drawn, one.trained, one.filtered, dropped, one.in_flight)
        why = "removed by retention" if one.step in found.without else "gone or damaged"
        ledger.add_row(*map(str, counts), "yes" if one.recounted else f"no: batches are {why}")
    title = "Prompts at every commit: drawn = trained + filtered + dropped + in flight"
    lines: list[RenderableType] = [heading(f"{found.run}. {title}"), ledger]
    if found.problems:
        problems = table("problem", "step", "")
        for problem in found.problems:
            step = "" if problem.step is None else str(problem.step)
            problems.add_row(problem.kind, step, text(problem.message))
        lines.append(problems)
    if found.orphans:
        lines.append(text(f"{len(found.orphans)} orphan(s), which nothing names:", "bold"))
        lines += [text(f"  {key}") for key in found.orphans[:SHOWN]]
        if len(found.orphans) > SHOWN:
            lines.append(text(f"  and {len(found.orphans) - SHOWN} more (--json names all)"))
    facts = [
        f"{len(found.steps)} commits in an unbroken chain" if found.good else "",
        f"which goes on from {found.origin}" if found.good and found.origin else "",
        f"{found.versions} policy versions and {found.snapshots} trainer snapshots",
        f"{found.evaluations} evaluations" if found.evaluations else "",
        f"{found.read.objects} objects ({bytes_text(found.read.nbytes)}) read and compared",
        f"{found.removed} batch objects removed by retention (store.keep_steps)"
        if found.removed
        else "",
        f"{len(found.unfinished)} objects of a step under way" if found.unfinished else "",
        f"{len(found.orphans)} orphan(s)",
    ]
    lines.append(text("; ".join(fact for fact in facts if fact) + "."))
    count = len(found.problems)
    verdict = f"{count} problem{'s' * (count > 1)} found." if count else "All is good."
    lines.append(text(verdict, "bold green" if found.good else "bold red"))
    return lines
