"""What a run of several tasks adds: which rows a step draws."""

from __future__ import annotations

from storage.batches.refs import BatchRef
from storage.prompts.cursor import TasksCursor
from tasks.results import Prompts
from tasks.run.contract import StepView
from tasks.run.features import Feature, ToCommit
from tasks.several_tasks.drawing import RowsOfTasks


def to_commit(run: StepView, step: int, prompts: Prompts, samples: BatchRef) -> ToCommit:
    """How many rows of each task were drawn so far, and how many passes over its data that is."""
    assert isinstance(prompts.cursor, TasksCursor)
    metrics = {}
    for name, place in prompts.cursor.tasks.items():
        metrics[f"task/{name}/rows"] = float(place.place)
        metrics[f"task/{name}/epoch"] = place.place / place.size
    return ToCommit(metrics=metrics)


FEATURE = Feature(next_rows=RowsOfTasks, commit=to_commit)
