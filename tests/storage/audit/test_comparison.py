"""In what two runs differ, of runs that are made without engines."""

from __future__ import annotations

import numpy as np

from storage.audit.comparison import compare, content, flat
from storage.batches.writing import write_batch
from storage.evaluations.results import (
    ConfidenceInterval,
    newest_evaluations,
)
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tests.storage.audit import small_run
from tests.storage.evaluations.stored import stored_evaluation

METRICS = {"reward/mean": 0.5, "time/step": 1.0}


def made(store: Store, name: str, steps: int = 3, odd: int = 0, **changes: object) -> RunStore:
    """A run whose step `odd` has changes to its commit."""
    run = RunStore(store, name)
    run.write_run({"config": {"seed": 1, "name": name}, "code": "0.1.0", "flow": "flows.grpo:grpo"})
    before = None
    for step in range(1, steps + 1):
        fields: dict[str, object] = {"metrics": {**METRICS, "time/step": float(step)}}
        before = small_run.take(run, step, before, **fields | (changes if step == odd else {}))
    return run


def test_runs_that_did_the_same_differ_in_no_step(store: Store) -> None:
    found = compare(made(store, "a"), made(store, "b", steps=2))
    assert found.differs is None
    assert found.steps == (3, 2)
    assert [one.name for one in found.settings] == ["name"]
    assert found.code == [] and found.data == []
    assert found.curves["time/step"] == [(1, 1.0, 1.0), (2, 2.0, 2.0)]


def test_the_first_step_that_differs_and_in_what(store: Store) -> None:
    first = made(store, "a")
    second = RunStore(store, "b")
    second.write_run({"config": {"seed": 2}, "code": "0.2.0", "flow": "flows.grpo:grpo"})
    one = small_run.take(second, 1, metrics=METRICS)
    ref = write_batch(store, second.stage_key(2, "x", 1, "k"), {"reward": np.ones(6, np.float32)})
    honest = small_run.take(RunStore(store, "c"), 1).refs
    two = small_run.take(
        second,
        2,
        one,
        refs={**honest, "samples": honest["samples"].with_columns(ref)},
        version_out=small_run.publish_version(RunStore(store, "other"), 9),
        metrics={**METRICS, "reward/mean": 1.0},
    )
    small_run.take(second, 3, two, metrics=METRICS)
    found = compare(first, second)
    assert found.differs is not None
    assert found.differs.step == 2
    # Batches of another run's first step: other prompts; the answers are alike in all small runs.
    assert found.differs.parts == ("prompts", "rewards", "batch", "weights")
    assert [(one.name, one.first, one.second) for one in found.settings] == [
        ("name", "a", None),
        ("seed", 1, 2),
    ]
    assert [one.name for one in found.code] == ["refrain"]


def test_batches_that_are_gone_are_said_to_be(store: Store) -> None:
    first = made(store, "a")
    second = made(store, "b", odd=2, metrics={"reward/mean": 0.9})
    store.delete(list(store.list("b/steps/000002/rollout")))
    found = compare(first, second).differs
    assert found is not None and found.step == 2
    assert found.unread == ("samples", "rewards", "batch")
    assert found.parts == ()


def test_content_is_the_same_however_rows_lie(store: Store) -> None:
    rows = {"reward": np.arange(4, dtype=np.float32), "response_ids": [[1], [2, 3], [], [4]]}
    whole = write_batch(store, "a/whole.safetensors", rows)
    halves = [
        write_batch(store, f"a/{n}.safetensors", {k: v[s] for k, v in rows.items()})
        for n, s in enumerate((slice(0, 2), slice(2, 4)))
    ]
    joined = halves[0].concat(halves)
    for column in rows:
        assert content(store, whole, (column,)) == content(store, joined, (column,))
    assert content(store, whole, ("reward",)) != content(
        store, whole.take([1, 0, 2, 3]), ("reward",)
    )


def test_settings_have_dotted_names() -> None:
    assert flat({"a": {"b": [1, {"c": None}], "d": {}}}) == {"a.b.0": 1, "a.b.1.c": None, "a.d": {}}


def test_evaluations_are_paired_by_suite_rows_and_version(store: Store) -> None:
    first, second = made(store, "a"), made(store, "b")
    for run, version, on, reward, at in (
        (first, 2, "rows", 0.25, 1.0),
        (first, 2, "rows", 0.5, 2.0),  # made again
        (second, 2, "rows", 0.75, 1.0),
        (first, 3, "rows", 0.1, 1.0),
        (second, 3, "other rows", 0.2, 1.0),
    ):
        stored_evaluation(
            run,
            f"{run.run}-{version}-{at}",
            version=version,
            on=on,
            metrics={"reward": reward, "failed": 0.0},
            intervals={"reward": ConfidenceInterval(low=0.0, high=1.0, kind="bootstrap")},
            made_at=at,
        )
    newest = newest_evaluations(first).values()
    assert [(one.suite, one.version, one.metrics["reward"]) for one in newest] == [
        ("sums", 2, 0.5),
        ("sums", 3, 0.1),
    ]
    [pair, failed] = compare(first, second).evaluations
    assert failed.metric == "failed"
    assert (pair.suite, pair.version, pair.first, pair.second) == ("sums", 2, 0.5, 0.75)
    assert pair.intervals == ((0.0, 1.0), (0.0, 1.0))
