"""Results of evaluations: found by content, known to runs by notes, kept from retention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from storage.audit.audit import Read, check_evaluation
from storage.batches.writing import write_batch
from storage.evaluations.results import (
    ROOT,
    EvaluationFiles,
    EvaluationResult,
    evaluations_of,
    find_result,
    note,
    notes_of,
    prompts_key,
    write_result,
)
from storage.objects.errors import ObjectDamaged
from storage.objects.store import Store
from storage.runs.run_store import RUN_NAME, RunStore
from storage.runs.weights import WeightsRef

WEIGHTS = WeightsRef(version=3, key="run/weights/v000003", digest="xxh3:a", nbytes=4)


@pytest.fixture
def run(tmp_path: Path) -> RunStore:
    return RunStore(Store(f"file://{tmp_path}"), "run")


def evaluated(run: RunStore, reward: float = 0.5, digest: str = "xxh3:a") -> EvaluationResult:
    """Two prompts, one right; the weights that samples were drawn with are `digest`."""
    files = EvaluationFiles(run.store, "abc")
    columns: dict[str, object] = {
        "reward": np.array([1, 0], np.float32),
        "status": np.zeros(2, np.int64),
        "prompt_row": np.arange(2),
        "weights_digest": [digest] * 2,
    }
    samples = write_batch(run.store, files.stage_key(0, "score", 1, digest[5:]), columns)
    prompts = write_batch(run.store, prompts_key("p"), {"prompt_ids": [[1], [2]]})
    return EvaluationResult(
        key="abc",
        suite="s",
        weights=WEIGHTS,
        engine="transformers",
        on="manner",
        metrics={"reward": reward, "samples": 2.0, "failed": 0.0},
        asked=2,
        samples=samples,
        prompts=prompts,
        right_from=1.0,
        seconds=0.1,
        asked_by="run",
    )


def stored(run: RunStore, result: EvaluationResult, version: int = 3) -> str:
    key = EvaluationFiles(run.store, "abc").result_key("summed")
    write_result(run.store, key, result)
    note(run, "s", version, key)
    return key


def test_a_result_is_read_as_it_was_written_and_a_run_knows_it(run: RunStore) -> None:
    result = evaluated(run)
    key = stored(run, result)
    assert find_result(run.store, key) == result
    assert find_result(run.store, key.replace("summed", "other")) is None
    assert evaluations_of(run) == evaluations_of(run, "s", 3) == [result]
    assert evaluations_of(run, "s", 4) == evaluations_of(run, "t") == []
    note(run, "s", 3, key)
    assert len(notes_of(run)) == 1, "a note is made once"
    other = RunStore(run.store, "other")
    note(other, "t", 0, key)
    (found,) = evaluations_of(other)
    assert (found.version, found.suite, found.metrics) == (0, "t", result.metrics)


def test_it_lies_where_no_run_can(run: RunStore) -> None:
    stored(run, evaluated(run))
    assert not RUN_NAME.fullmatch(ROOT)
    own = [key for key in run.store.list("run") if "/evaluations/" in key]
    assert len(own) == 1 and own[0].startswith("run/evaluations/s/v000003-")
    assert len(run.store.list(ROOT)) == 3


def test_damage_is_found(run: RunStore) -> None:
    key = stored(run, evaluated(run))
    data = run.store.read(key)
    run.store.write(key, data.replace(b'"reward": 0.5', b'"reward": 0.9'))
    with pytest.raises(ObjectDamaged):
        evaluations_of(run)


def test_the_audit_recounts_an_evaluation(run: RunStore) -> None:
    digests = {3: "xxh3:a"}
    key = stored(run, evaluated(run))
    check_evaluation(run, "s", 3, key, digests, Read())
    with pytest.raises(ValueError, match="measured weights xxh3:a, and the version has xxh3:z"):
        check_evaluation(run, "s", 3, key, {3: "xxh3:z"}, Read())
    key = stored(run, evaluated(run, reward=0.75))
    with pytest.raises(ValueError, match=r"says reward = 0\.75, and its samples 0\.5"):
        check_evaluation(run, "s", 3, key, digests, Read())
    key = stored(run, evaluated(run, digest="xxh3:b"))
    with pytest.raises(ValueError, match="samples were drawn with xxh3:b"):
        check_evaluation(run, "s", 3, key, digests, Read())
    result = evaluated(run)
    counted = result.model_copy(update={"metrics": result.metrics | {"failed": 1.0}})
    key = stored(run, counted)
    with pytest.raises(ValueError, match=r"says failed = 1\.0, and its samples are 0"):
        check_evaluation(run, "s", 3, key, digests, Read())


def test_shards_that_are_finished_are_found_again(run: RunStore) -> None:
    files = EvaluationFiles(run.store, "abc")
    key = files.stage_key(0, "evaluate", 2, "k")
    assert files.finished(key) is None
    assert files.finish(key, {"a": 1}) == {"a": 1}
    assert files.finish(key, {"a": 2}) == {"a": 1}, "the first stands"
    assert EvaluationFiles(run.store, "abc").finished(key) == {"a": 1}
    assert EvaluationFiles(run.store, "abd").finished(key.replace("abc", "abd")) is None
    assert replace(files, key="x").folder == f"{ROOT}/x"
