"""Retention and resuming go by an index, which is as good as listing and never trusted over commits."""

import logging
import re

import pytest

from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects import documents
from storage.objects.store import Store
from storage.objects.usage import COUNTER
from storage.runs.commit_log import Commit, commit, read_commit
from storage.runs.forks import begin_at, pin
from storage.runs.retention import INDEX_FORMAT, clear, orphans, read_index, sweep
from storage.runs.run_store import RunStore
from tests.storage.audit import small_run


def a_step(run: RunStore, step: int, **fields: object) -> Commit:
    """A step of two shards, made quickly; every fifth has a snapshot, every seventh a borrowed row."""
    refs = {"batch": BatchRef.concat([_shard(run, step, shard) for shard in range(2)])}
    if step % 7 == 0:
        refs["carried"] = read_commit(run, step - 2).refs["batch"].rows(0, 1)
    versions = [small_run.publish_version(run, one) for one in (step - 1, step)]
    made = Commit.model_validate(
        {
            "step": step,
            "parent": step - 1,
            "refs": refs,
            "version_in": versions[0],
            "version_out": versions[1],
            **fields,
        }
    )
    if step % 5 == 0:
        small_run.snapshot(run, step)
    return commit(run, made)


def _shard(run: RunStore, step: int, shard: int) -> BatchRef:
    return write_batch(
        run.store, run.stage_key(step, "rollout", shard, "k"), {"reward": [step, shard]}
    )


def swept(run: RunStore) -> list[str]:
    return sweep(run, keep_versions=2, keep_steps=3, keep_snapshots=1)


def test_with_an_index_goes_what_goes_without(store: Store) -> None:
    with_index, without = RunStore(store, "with"), RunStore(store, "without")
    for run in (with_index, without):
        small_run.begin(run)
    for step in range(1, 33):
        for run in (with_index, without):
            a_step(run, step)
            if step == 17:  # a child keeps steps 16 and 17 from now on
                child = RunStore(store, f"child-of-{run.run}")
                origin = begin_at(run, 17, fork=True, trainer_state=True)
                small_run.begin(child, origin)
                pin(child, origin)
            if step == 28:  # until it is removed
                store.delete([RunStore(store, f"child-of-{run.run}").run_json_key])
                key = f"{run.run}/children/child-of-{run.run}.json"
                store.write(key, _aged(store.read(key)))
        store.delete([f"{without.run}/index.json"])
        assert _names(swept(without)) == _names(swept(with_index))
    left = [_names(store.list(one)) for one in ("with", "without")]
    assert left[0] == left[1]
    assert "steps/000019/rollout/0-k.safetensors" not in left[0]


def _names(keys: list[str]) -> set[str]:
    """Without the run, its child, and the token of who wrote the weights."""
    names = {re.sub(r"(model-\d+)-\w+", r"\1", key.partition("/")[2]) for key in keys}
    return {name.partition("-of-")[0] for name in names}


def _aged(data: bytes) -> bytes:
    from storage.runs.retention import PIN_FORMAT

    body = documents.decode(PIN_FORMAT, "pin", data)
    return documents.encode(PIN_FORMAT, body | {"made_at": 0.0})


def test_a_sweep_costs_the_same_at_every_step(run: RunStore) -> None:
    cost: dict[int, int] = {}
    small_run.begin(run)
    for step in range(1, 83):
        a_step(run, step)
        before = COUNTER.total()
        swept(run)
        cost[step] = (COUNTER.total() - before).requests
    assert [cost[step] for step in range(11, 46)] == [cost[step] for step in range(46, 81)]
    assert max(cost[step] for step in range(11, 81)) < 40


def test_resuming_looks_at_the_steps_in_which_something_may_lie(run: RunStore) -> None:
    small_run.begin(run)
    keep = {"keep_versions": 9, "keep_steps": None, "keep_snapshots": 9}
    cost = {}
    for step in range(1, 41):
        a_step(run, step, attempts=[{"stage": "rollout", "number": 1 + (step == 3)}])
        sweep(run, **keep)  # type: ignore[arg-type]
        if step in (20, 40):
            _shard(run, step + 1, 1)  # a dead flow began this
            before = COUNTER.total()
            clear(run, step)
            cost[step] = (COUNTER.total() - before).requests
        if step == 2:  # the first try of the next step, which fails after it wrote
            late = write_batch(run.store, run.stage_key(3, "rollout", 0, "late"), {"reward": [1]})
    assert orphans(run, 40) == []
    assert not any(run.store.exists(key) for key in late.objects)
    assert max(cost.values()) < 40
    _shard(run, 41, 7)  # of the dead flow's shards one is not used
    a_step(run, 41)
    assert clear(run, 41) == [run.stage_key(41, "rollout", 7, "k")]


@pytest.mark.parametrize("how", ["damaged", "of another run", "ahead"])
def test_an_index_that_does_not_hold_is_made_anew(
    run: RunStore, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    small_run.begin(run)
    for step in range(1, 8):
        a_step(run, step)
    swept(run)
    index = read_index(run, 7)
    assert index is not None and index.versions == [0, 5, 6, 7]
    wrong = {"of another run": {"commit_digest": "xxh3:0"}, "ahead": {"step": 9}}.get(how, {})
    data = documents.encode(INDEX_FORMAT, index.model_dump(mode="json") | wrong)
    run.store.write(f"{run.run}/index.json", data if wrong else data[:-9])
    with caplog.at_level(logging.WARNING):
        assert read_index(run, 7) is None
    assert "It is made anew." in caplog.text
    a_step(run, 8)
    assert run.stage_key(1, "rollout", 0, "k") not in run.store.list("run")
    swept(run)
    made = read_index(run, 8)
    assert made is not None
    assert (made.versions, made.snapshots["actor"]) == ([0, 5, 7, 8], [5])
