"""What a resumed run takes over from evaluations beside the steps of a flow that died."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tasks.evaluation.evaluate import Evaluations
from tasks.run.features import features_of
from tests.storage.evaluations.stored import stored_evaluation


def evaluated(
    run: RunStore, suite: str, version: int, reward: float, at: float, back_fill: bool = False
) -> None:
    metrics = {"reward": reward, "failed": 0.0}
    stored_evaluation(
        run, f"{version}-{at}", suite, version, metrics=metrics, made_at=at, back_fill=back_fill
    )


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
    config: Any = SimpleNamespace(features=("guards",) if guards else ())
    run: Any = SimpleNamespace(
        files=files,
        evaluated=set(),
        measured={},
        last=SimpleNamespace(committed_at=10.0),
        features=features_of(config),
    )
    evaluations = object.__new__(Evaluations)
    evaluations._run = run
    for version in (3, 4, 5):
        evaluations._recall(version)
    assert run.evaluated == {3, 4, 5}
    assert run.measured.get("eval/sums/reward") == (0.4 if guards else None)
    assert "eval/before/reward" not in run.measured
