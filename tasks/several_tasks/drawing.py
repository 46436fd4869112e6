"""Which tasks the prompts of a step are of, by the settings and by what earlier steps measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from configs.data import SuccessCurriculum, TasksSource
from storage.prompts.cursor import Cursor, TasksCursor
from storage.prompts.tasks import TaskRows, draw_tasks, shared_out
from storage.runs.commit_log import read_outline
from storage.runs.run_store import committer
from tasks.run.clock import KnownRows
from tasks.run.contract import RunView
from tasks.run.features import NextRows

PARTS = 1000  # in which shares are counted that are measured, so that what is owed stays short


class RowsOfTasks(NextRows):
    """The rows of some prompts: each that is dropped is replaced by one of its task."""

    def __init__(self, run: RunView, step: int, cursor: Cursor, count: int) -> None:
        assert isinstance(run.source, TaskRows) and isinstance(cursor, TasksCursor)
        self._source, self._fresh = run.source, run.fresh
        wanted, self._shared = shared_out(cursor, count, weights(run, step))
        self._wanted = Counter(wanted)
        self._begun = False

    def draw(self, cursor: Cursor, known: KnownRows) -> tuple[list[int], Cursor]:
        """The rows that are wanted, and the cursor after them."""
        place = cursor if self._begun else self._shared
        assert isinstance(place, TasksCursor)
        self._begun = True
        rows, after = draw_tasks(
            self._source, place, self._wanted, self._fresh, known.kept_out, known.ranks
        )
        self._wanted = Counter()
        return rows, after

    def dropped(self, rows: Sequence[int]) -> None:
        """These made no prompts."""
        self._wanted.update(map(self._source.task_of, rows))


def weights(run: RunView, step: int) -> dict[str, Fraction]:
    """The weight of each task in a step."""
    source = run.config.data.source
    assert isinstance(source, TasksSource)
    found = {
        name: Fraction(str(task.weight_at(step))) for name, task in sorted(source.tasks.items())
    }
    if source.curriculum is None:
        return found
    factors = {name: factor(source.curriculum, rate(run, step, name)) for name in found}
    total = sum(float(found[name]) * factors[name] for name in found)
    return {
        name: Fraction(max(1, round(PARTS * float(weight) * factors[name] / total)))
        if weight
        else weight
        for name, weight in found.items()
    }


def factor(curriculum: SuccessCurriculum, right: float) -> float:
    """By what a task's weight is multiplied, of whose samples this share was right."""
    return max(curriculum.floor, 4 * right * (1 - right))


def rate(run: RunView, step: int, task: str) -> float:
    """The share of a task's samples that were right, mean over the last steps that a draw knows of.

    Those are committed before it, whatever overlaps: so the same is drawn after a resume. One half
    where there are none.
    """
    source = run.config.data.source
    assert isinstance(source, TasksSource) and source.curriculum is not None
    values: list[float] = []
    last = step - 1 - run.config.max_staleness
    # Further back than twice as many steps nothing is asked: a task may have had no weight.
    for before in range(last, max(0, last - 2 * source.curriculum.steps), -1):
        try:
            owner, number = committer(run.files, before)
        except ValueError:
            break
        value = read_outline(owner, number).metrics.get(f"task/{task}/right")
        if value is not None:
            values.append(value)
        if len(values) == source.curriculum.steps:
            break
    return sum(values) / len(values) if values else 0.5
