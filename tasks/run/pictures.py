"""The pictures that a run leaves in its store: its curves, and what each engine did."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from storage.runs.commit_log import Commit, history
from storage.runs.curves import History
from storage.runs.run_store import RunStore
from storage.tracking.plots import TimelineCall, progress_png, timeline_png

TIMELINE_STEPS = 12  # the last ones; more would only blur
TRAINERS = "train"  # in the timeline, for calls that all train workers carry out together


def curves_key(run: str) -> str:
    """Where a run's curves are."""
    return f"{run}/progress.png"


def draw_curves(files: RunStore, steps: History) -> bytes:
    """Keep the curves of a run's steps as a PNG, and return it."""
    numbers, metrics = zip(*steps, strict=True)
    image = progress_png(list(numbers), list(metrics), title=files.run)
    files.store.write(curves_key(files.run), image)
    return image


def draw_timeline(files: RunStore) -> bytes:
    """Keep a picture of which engine did what and when over the last steps, and return it."""
    image = timeline_png(work_of(itertools.islice(history(files), TIMELINE_STEPS)), files.run)
    files.store.write(f"{files.run}/timeline.png", image)
    return image


def work_of(commits: Iterable[Commit]) -> list[TimelineCall]:
    """What the engines did for some steps, by the attempts that their commits keep."""
    return [
        TimelineCall(
            engine=str(attempt["worker"] or TRAINERS),
            stage=str(attempt["stage"]),
            step=commit.step,
            start=float(str(attempt["started"])),
            seconds=float(str(attempt["seconds"])),
        )
        for commit in commits
        for attempt in commit.attempts
    ]
