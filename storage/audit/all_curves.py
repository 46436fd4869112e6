"""Every metric of a run by step, from commits and evaluations: for exporters and the dossier."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from storage.audit.step_search import segments
from storage.evaluations.results import newest_evaluations
from storage.runs.commit_log import head, read_outline
from storage.runs.run_store import RunStore

AT_ONCE = 8  # commits that are read


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The metrics of a step."""

    step: int
    at: float  # when it was committed, in seconds since 1970
    metrics: dict[str, float]  # by name; eval/SUITE/METRIC of the version that the step made


def points_of(run: RunStore) -> list[Point]:
    """All steps of a run, of a fork its parent's before them, ascending. ValueError for none."""
    if head(run) is None:
        raise ValueError(f"Run {run.run} has no committed step, so no curves.")
    return with_evaluations(run, committed_points(run))


def committed_points(run: RunStore, after: int = 0) -> list[Point]:
    """The steps after one, as their commits have them; several are read at a time."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        outlines = threads.map(lambda place: read_outline(*place), _places(run, after))
        return [
            Point(
                step=outline.step,
                at=outline.committed_at,
                metrics={
                    name: value for name, value in outline.metrics.items() if value is not None
                },
            )
            for outline in outlines
        ]


def with_evaluations(run: RunStore, points: Sequence[Point]) -> list[Point]:
    """The same with what evaluations there are by now of the versions that the steps made."""
    measured: dict[int, dict[str, float]] = {}
    for result in newest_evaluations(run).values():
        named = {f"eval/{result.suite}/{name}": value for name, value in result.metrics.items()}
        measured.setdefault(result.version, {}).update(named)
    return [
        replace(point, metrics=point.metrics | measured.get(point.step, {})) for point in points
    ]


def _places(run: RunStore, after: int) -> list[tuple[RunStore, int]]:
    """Where the steps after one were committed, ascending."""
    places: list[tuple[RunStore, int]] = []
    for segment in segments(run):
        steps = range(max(segment.first, after + 1), segment.last + 1)
        places = [*((segment.run, step) for step in steps), *places]
        if segment.origin is None or not segment.origin.fork:
            break  # what was before has numbers of its own
    return places


def as_csv(points: Sequence[Point]) -> str:
    """A line a step: step, seconds since 1970, and each metric; empty where a step has none."""
    names = sorted({name for point in points for name in point.metrics})
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["step", "committed_at", *names])
    for point in points:
        lines.writerow([point.step, point.at, *(point.metrics.get(name, "") for name in names)])
    return text.getvalue()
