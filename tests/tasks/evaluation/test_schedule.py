"""What a resumed run takes over from evaluations beside the steps of a flow that died."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from storage.batches.writing import write_batch
from storage.evaluations.results import EvaluationResult, note, write_result
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from storage.runs.weights import WeightsRef
from tasks.evaluation.schedule import Evaluations


def evaluated(
    run: RunStore, suite: str, version: int, reward: float, at: float, back_fill: bool = False
) -> None:
    key = f"_evaluations/{version}-{at}/result-1.json"
    samples = write_batch(run.store, f"{key}-samples", {"reward": np.ones(1, np.float32)})
    result = EvaluationResult(
        key=f"{version}-{at}",
        suite=suite,
        weights=WeightsRef(version=version, key="w", digest="xxh3:a", nbytes=4),
        engine="transformers",
        on="rows",
        metrics={"reward": reward, "failed": 0.0},
        asked=1,
        samples=samples,
        prompts=samples,
        right_from=1.0,
        seconds=0.1,
        asked_by=run.run,
        made_at=at,
        back_fill=back_fill,
    )
    write_result(run.store, key, result)
    note(run, suite, version, key)


@pytest.mark.parametrize("guards", [True, False])
def test_a_value_that_no_commit_has_judged_is_judged_with_the_next(
    tmp_path: Path, guards: bool
) -> None:
    """The last commit was at 10 s: what was measured before it may have been judged in it."""
    files = RunStore(Store(str(tmp_path)), "a")
    evaluated(files, "before", 3, 0.3, at=9.0)
    evaluated(files, "sums", 4, 0.4, at=11.0)
    evaluated(
        files, "sums", 5, 0.5, at=12.0, back_fill=True
    )  # by a person, of a version of the past
    run: Any = SimpleNamespace(
        files=files,
        evaluated=set(),
        measured={},
        last=SimpleNamespace(committed_at=10.0),
        config=SimpleNamespace(guards=[object()] if guards else []),
    )
    evaluations = object.__new__(Evaluations)
    evaluations._run = run
    for version in (3, 4, 5):
        evaluations._recall(version)
    assert run.evaluated == {3, 4, 5}
    assert run.measured.get("eval/sums/reward") == (0.4 if guards else None)
    assert "eval/before/reward" not in run.measured
