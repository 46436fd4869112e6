"""Where evaluations lie: below a key of their content, and not of the run that asked for them.

_evaluations/<key>/ has the shards of one suite on one policy version, and result-<key>.json for each
way in which they were summed up. _evaluations/prompts/ has the suites' prompts. No run can be called
so, and no run's retention looks there. <run>/evaluations/<suite>/v000010-<key>.json is a note that
names a result of the run's.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.objects.store import Store
from storage.runs.run_store import DATA_SUFFIX, RunStore, StageStore

ROOT = "_evaluations"
NOTES = "evaluations"  # folder of a run


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
