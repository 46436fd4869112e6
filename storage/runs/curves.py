"""The metrics that a run's picture and its table show, of all its steps, in one object.

`curves.json` saves a resumed run from reading every commit. It names the commit that it goes up to by
digest; where the commits do not bear that out, or it is missing, they are read instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from pydantic import model_validator

from storage.objects import documents
from storage.objects.documents import StoredRecord
from storage.objects.errors import ObjectDamaged, ObjectMissing
from storage.runs.commit_log import read_commit_digest, read_outline
from storage.runs.run_store import RunStore, start_of
from storage.tracking.plots import KL, MEANING_CHANGED, REWARD_MEAN, REWARD_STD, STAGE_SECONDS

log = logging.getLogger(__name__)

FORMAT = "refrain.curves/1"
EVERY = 10  # steps between two writes in the first 2,000; then a hundredth of the steps so far
SHOWN = (REWARD_MEAN, REWARD_STD, KL, "retries")  # besides the seconds of stages, and marks

History = list[tuple[int, dict[str, float]]]  # step, its metrics by name; ascending


class Curves(StoredRecord):
    """Metrics by name, of a run's steps in order."""

    first: int  # step of the first value of each
    step: int  # of the last
    commit_digest: str  # of that step's commit.json
    metrics: dict[str, list[float | None]]  # [step - first + 1] each; None where a step has none

    @model_validator(mode="after")
    def _whole(self) -> Curves:
        lengths = {len(values) for values in self.metrics.values()}
        if lengths - {self.step - self.first + 1}:
            raise ValueError(
                f"its curves have {sorted(lengths)} steps, not {self.first} to {self.step}"
            )
        return self


def shown(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Those of a step's metrics that are shown."""
    return {
        name: value
        for name, value in metrics.items()
        if value is not None
        and (name in SHOWN or name.startswith((STAGE_SECONDS, MEANING_CHANGED)))
    }


def are_due(step: int) -> bool:
    """Whether the curves are written after a step.

    Each write has all steps, so what is written in all would grow with their square; so it grows with
    their number, and a resumed run reads at most a hundredth of the commits, or ten.
    """
    return step % (EVERY * max(1, step // (100 * EVERY))) == 0


def write_curves(run: RunStore, step: int, history: Sequence[tuple[int, dict[str, float]]]) -> None:
    """Keep the metrics of the steps up to a committed one. Only under the run's lease."""
    rows = [metrics for at, metrics in history if at <= step]
    names = sorted({name for metrics in rows for name in metrics})
    record = Curves(
        first=step - len(rows) + 1,
        step=step,
        commit_digest=read_commit_digest(run, step),
        metrics={name: [metrics.get(name) for metrics in rows] for name in names},
    )
    documents.write_record(run.store, _key(run), FORMAT, record, indent=None)


def read_history(run: RunStore, head: int) -> History:
    """The shown metrics of each of a run's steps up to a committed one.

    What has been kept, and the commits since; all commits where it does not hold.
    """
    curves = _read(run, head)
    history: History = []
    if curves is not None:
        names = list(curves.metrics)
        for number, step in enumerate(range(curves.first, curves.step + 1)):
            values = {name: curves.metrics[name][number] for name in names}
            history.append((step, {name: x for name, x in values.items() if x is not None}))
    first = start_of(run) + 1 if curves is None else curves.step + 1
    return history + [
        (step, shown(read_outline(run, step).metrics)) for step in range(first, head + 1)
    ]


def _read(run: RunStore, head: int) -> Curves | None:
    """What has been kept, unless it cannot be of these commits."""
    try:
        curves = documents.read_record(Curves, run.store, _key(run), FORMAT)
        if curves is not None and not (
            curves.first == start_of(run) + 1
            and curves.step <= head
            and curves.commit_digest == read_commit_digest(run, curves.step)
        ):
            raise ObjectDamaged(f"Object {_key(run)} is not of this run's commits.")
    except ObjectMissing:
        return None
    except ObjectDamaged as error:
        log.warning("%s The commits are read instead.", error)
        return None
    return curves


def _key(run: RunStore) -> str:
    return f"{run.run}/curves.json"
