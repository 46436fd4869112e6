"""Every metric of a run by step, from commits and evaluations: for exporters and the dossier."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from storage.audit.comparison import first_step, outline_of
from storage.evaluations.results import newest_evaluations
from storage.runs.commit_log import head
from storage.runs.run_store import RunStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The metrics of a step."""

    step: int
    at: float  # when it was committed, in seconds since 1970
    metrics: dict[str, float]  # by name; eval/SUITE/METRIC of the version that the step made


def points_of(run: RunStore) -> list[Point]:
    """All steps of a run, of a fork its parent's before them, ascending. ValueError for none."""
    last = head(run)
    if last is None:
        raise ValueError(f"Run {run.run} has no committed step, so no curves.")
    measured: dict[int, dict[str, float]] = {}
    for one in newest_evaluations(run).values():
        named = {f"eval/{one.suite}/{name}": value for name, value in one.metrics.items()}
        measured.setdefault(one.version, {}).update(named)
    found = []
    for step in range(first_step(run), last + 1):
        outline = outline_of(run, step)
        own = {name: value for name, value in outline.metrics.items() if value is not None}
        own |= measured.get(step, {})
        found.append(Point(step=step, at=outline.committed_at, metrics=own))
    return found


def as_csv(points: Sequence[Point]) -> str:
    """A line a step: step, seconds since 1970, and each metric; empty where a step has none."""
    names = sorted({name for point in points for name in point.metrics})
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["step", "committed_at", *names])
    for point in points:
        lines.writerow([point.step, point.at, *(point.metrics.get(name, "") for name in names)])
    return text.getvalue()
