"""Evaluations that runs of the tests know, with one scored sample each."""

from __future__ import annotations

from typing import Any

import numpy as np

from storage.batches.writing import write_batch
from storage.evaluations.results import EvaluationResult, note, write_result
from storage.runs.run_store import RunStore
from storage.runs.weights import WeightsRef


def stored_evaluation(
    run: RunStore,
    name: str,
    suite: str = "sums",
    version: int = 1,
    digest: str = "xxh3:a",
    **fields: Any,
) -> str:
    """Store an evaluation of one prompt, noted in the run; returns its key, which is `name`.

    `digest`: of the weights; `fields`: of the result, where they are not those below.
    """
    key = f"_evaluations/{name}/result-1.json"
    samples = write_batch(run.store, f"{key}-samples", {"reward": np.ones(1, np.float32)})
    given: dict[str, Any] = {
        "key": name,
        "suite": suite,
        "weights": WeightsRef(version=version, key="w", digest=digest, nbytes=4),
        "engine": "transformers",
        "on": "rows",
        "metrics": {"reward": 1.0, "failed": 0.0},
        "asked": 1,
        "samples": samples,
        "prompts": samples,
        "right_from": 1.0,
        "seconds": 0.1,
        "asked_by": run.run,
    }
    write_result(run.store, key, EvaluationResult(**given | fields))
    note(run, suite, version, key)
    return name
