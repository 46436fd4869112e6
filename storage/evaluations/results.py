"""What an evaluation came to, as it is stored, and which evaluations a run has."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, JsonValue

from storage.batches.refs import BatchRef
from storage.objects import documents
from storage.objects.documents import StoredRecord, key_of
from storage.objects.store import Store
from storage.runs.run_store import DATA_SUFFIX, RunStore, StageStore
from storage.runs.weights import WeightsRef

ROOT = "_evaluations"
NOTES = "evaluations"  # folder of a run

FORMAT = "refrain.evaluation/1"
NOTE_FORMAT = "refrain.evaluation-note/1"


@dataclass(frozen=True, slots=True)
class EvaluationFiles(StageStore):
    """The store of one evaluation. Small and picklable, as the store is."""

    store: Store
    key: str  # of version, prompts, sampling and scoring code

    @property
    def folder(self) -> str:
        """Where all of it lies."""
        return f"{ROOT}/{self.key}"

    def step_key(self, step: int) -> str:
        """The same: an evaluation has no steps."""
        return self.folder

    def result_key(self, summed: str) -> str:
        """The result; `summed`: key of the settings by which samples are summed up."""
        return f"{self.folder}/result-{summed}.json"


def prompts_key(key: str) -> str:
    """The prompts of a suite; `key`: of rows, template and tokenizer."""
    return f"{ROOT}/prompts/1-{key}{DATA_SUFFIX}"


def note_key(run: RunStore, suite: str, version: int, key: str) -> str:
    """The note by which a run knows a result; `key`: of the result."""
    return f"{run.run}/{NOTES}/{suite}/v{version:06d}-{key}.json"


class ConfidenceInterval(StoredRecord):
    """A 95 % interval."""

    low: float
    high: float
    kind: Literal["wilson", "bootstrap"]


class EvaluationResult(StoredRecord):
    """One suite on one policy version. Means are over prompts, of scored samples alone."""

    key: str  # _evaluations/<key>/: of version, prompts, sampling and scoring code
    suite: str  # as the run that asked called it
    weights: WeightsRef  # the version, whose digest every engine attested that sampled
    engine: str  # rollout.engine
    on: str  # digest of rows and manner: only evaluations with the same one can be compared
    metrics: dict[str, float]  # docs/evaluation.md; those that have a value
    intervals: dict[str, ConfidenceInterval] = Field(default_factory=dict)  # by metric
    asked: int  # prompts
    dropped: dict[str, list[int]] = Field(default_factory=dict)  # rows without a prompt, by reason
    samples: BatchRef  # completions with scores, in the order of the prompts
    prompts: BatchRef
    # What scored, by the digest in the samples' column reward_code: a record per function.
    reward_code: dict[str, list[dict[str, JsonValue]]] = Field(default_factory=dict)
    right_from: float  # reward from which on a sample is right
    seconds: float  # from the first question to the last score, of the process that finished it
    asked_by: str  # run for which it was made
    back_fill: bool = False  # made afterwards, on workers whose cost no commit of that run has
    # What its calls had of devices (docs/evaluation.md); {} of an older Refrain's.
    cost: dict[str, float] = Field(default_factory=dict)
    made_at: float = Field(default_factory=time.time)  # seconds since 1970

    @property
    def version(self) -> int:
        """Number of the version, in the run whose evaluation it is."""
        return self.weights.version

    @property
    def failed(self) -> int:
        """Samples that could not be scored."""
        return int(self.metrics["failed"])

    def known_as(self, suite: str, version: int) -> EvaluationResult:
        """The same by the names of a run, which need not be those of the one that asked first."""
        weights = self.weights.model_copy(update={"version": version})
        return self.model_copy(update={"suite": suite, "weights": weights})

    def interval(self, metric: str = "reward") -> ConfidenceInterval | None:
        """That of a metric, where there is one."""
        return self.intervals.get(metric)


def read_result(store: Store, key: str) -> EvaluationResult:
    """Raises ObjectMissing, ObjectDamaged."""
    return documents.validated(EvaluationResult, key, documents.read(store, key, FORMAT))


def find_result(store: Store, key: str) -> EvaluationResult | None:
    """The result, if it is there. Raises ObjectDamaged."""
    return read_result(store, key) if store.exists(key) else None


def write_result(store: Store, key: str, result: EvaluationResult) -> None:
    """Store a result, in place of one of the same samples in which some could not be scored."""
    store.write(key, documents.encode(FORMAT, result.model_dump(mode="json")))


def note(run: RunStore, suite: str, version: int, result_key: str) -> None:
    """Have a run know a result; a second time changes nothing.

    version: number that the run counts it by, which for a fork's first is its parent's.
    """
    body = {"suite": suite, "version": version, "result": result_key}
    key = note_key(run, suite, version, key_of(result_key))
    run.store.create(key, documents.encode(NOTE_FORMAT, body))


def notes_of(run: RunStore) -> dict[str, tuple[str, int, str]]:
    """The run's notes by key: suite, version, key of the result. Raises ObjectDamaged."""
    notes = {}
    for key in sorted(run.store.list(f"{run.run}/{NOTES}")):
        if key.endswith(".json"):
            body = documents.read(run.store, key, NOTE_FORMAT)
            notes[key] = (str(body["suite"]), int(str(body["version"])), str(body["result"]))
    return notes


def evaluations_of(
    run: RunStore, suite: str | None = None, version: int | None = None
) -> list[EvaluationResult]:
    """The evaluations of a run's versions, ascending by suite, version and time.

    Of several of one suite on one version, as after a change of its settings, the last is newest.
    Raises ObjectMissing, ObjectDamaged.
    """
    results = [
        read_result(run.store, key).known_as(name, number)
        for name, number, key in notes_of(run).values()
        if suite in (None, name) and version in (None, number)
    ]
    return sorted(results, key=lambda result: (result.suite, result.version, result.made_at))


def newest_evaluations(run: RunStore) -> dict[str, EvaluationResult]:
    """The newest evaluation of each suite on each version, ascending, by the key it lies under.

    Raises ObjectMissing, ObjectDamaged.
    """
    newest: dict[tuple[str, int], tuple[str, EvaluationResult]] = {}
    for suite, version, key in notes_of(run).values():
        result = read_result(run.store, key).known_as(suite, version)
        previous = newest.get((suite, version))
        if previous is None or result.made_at >= previous[1].made_at:
            newest[suite, version] = (key, result)
    return dict(newest[name] for name in sorted(newest))
