"""What suites measured of a run's policy versions, as other commands show it beside the curves.

Of the stored results (docs/evaluation.md) only the numbers are read.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from storage.objects import documents
from storage.runs.run_store import RunStore

NOTES = "evaluations"  # folder of a run
NOTE, RESULT = "refrain.evaluation-note/1", "refrain.evaluation/1"  # formats


class _Interval(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    low: float
    high: float


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    on: str
    metrics: dict[str, float]
    intervals: dict[str, _Interval] = {}
    made_at: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """A suite on a policy version."""

    suite: str
    version: int
    on: str  # digest of rows and manner: only evaluations with the same one can be compared
    metrics: dict[str, float]  # reward, pass@1, …
    intervals: dict[str, tuple[float, float]]  # 95 %, by metric
    key: str  # of the stored result


def evaluated(run: RunStore) -> list[Evaluated]:
    """The newest result of each suite on each version, ascending. Raises ObjectDamaged."""
    newest: dict[tuple[str, int], tuple[float, Evaluated]] = {}
    for note in sorted(run.store.list(f"{run.run}/{NOTES}")):
        if not note.endswith(".json"):
            continue
        said = documents.read(run.store, note, NOTE)
        suite, version, key = str(said["suite"]), int(str(said["version"])), str(said["result"])
        found = documents.validated(_Result, key, documents.read(run.store, key, RESULT))
        if found.made_at >= newest.get((suite, version), (0.0, None))[0]:
            intervals = {name: (one.low, one.high) for name, one in found.intervals.items()}
            newest[suite, version] = (
                found.made_at,
                Evaluated(
                    suite=suite,
                    version=version,
                    on=found.on,
                    metrics=found.metrics,
                    intervals=intervals,
                    key=key,
                ),
            )
    return [newest[name][1] for name in sorted(newest)]
