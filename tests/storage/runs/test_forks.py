"""A run that begins at a step of another one: its chain of commits, and what the parent keeps."""

import pytest
import torch

from storage.batches.writing import write_batch
from storage.objects.errors import Conflict, ObjectDamaged, ObjectMissing
from storage.runs.commit_log import (
    Commit,
    Ledger,
    commit,
    head,
    history,
    read_commit,
    read_commit_digest,
)
from storage.runs.forks import NoSuchOrigin, begin_at, pin, shared_weights
from storage.runs.retention import pins, sweep
from storage.runs.run_store import ORIGIN_FIELD, RunStore, ancestry, committer, origin_of, start_of
from storage.runs.snapshots import ReplayStart, base_of, mark, snapshots
from storage.runs.weights import WeightsRef
from storage.runs.weights_writing import publish


def publish_version(run: RunStore, version: int) -> WeightsRef:
    tensors = [("w", torch.full((4,), float(version)))]
    return publish(run.store, run.run, version, tensors, {"config.json": b"{}"})


def take(run: RunStore, step: int, before: WeightsRef) -> WeightsRef:
    """A committed step."""
    ref = write_batch(run.store, run.stage_key(step, "advantage", 1, "k"), {"reward": [1.0, step]})
    out = publish_version(run, step)
    ledger = Ledger(drawn=2 * step, trained=2 * step)
    record = Commit(
        step=step,
        parent=step - 1,
        refs={"batch": ref},
        version_in=before,
        version_out=out,
        ledger=ledger,
        cursor={"position": 2 * step},
    )
    commit(run, record)
    return out


def snapshot(run: RunStore, step: int) -> None:
    run.store.write(f"{run.state_key(step)}/0.distcp", b"state")
    mark(run, step)


@pytest.fixture
def parent(run: RunStore) -> RunStore:
    """Six steps, with snapshots after 2 and 4."""
    run.write_run({"config": {}})
    version = publish_version(run, 0)
    for step in range(1, 7):
        version = take(run, step, version)
        if step in (2, 4):
            snapshot(run, step)
    return run


def child_of(
    parent: RunStore, name: str, step: int, fork: bool = True, **options: bool
) -> RunStore:
    child = RunStore(parent.store, name)
    origin = begin_at(parent, step, fork=fork, **options)
    child.write_run({"config": {}, ORIGIN_FIELD: origin.model_dump(mode="json")})
    pin(child, origin)
    return child


def test_a_forks_chain_goes_on_from_the_parents(parent: RunStore) -> None:
    child = child_of(parent, "child", 4)
    assert start_of(child) == 4
    assert head(child) is None
    weights = shared_weights(child)
    assert weights == read_commit(parent, 4).version_out
    with pytest.raises(Conflict, match="follows step 5, but the last committed step is 4"):
        take(child, 6, weights)
    take(child, 5, weights)
    assert head(child) == 5
    made = read_commit(child, 5)
    assert (made.parent, made.parent_run) == (4, "run")
    assert made.parent_digest == read_commit_digest(parent, 4)
    take(child, 6, made.version_out)
    assert [commit.step for commit in history(child)] == [6, 5]
    assert read_commit(child, 6).parent_run is None
    assert committer(child, 5) == (child, 5)
    assert committer(child, 4) == (parent, 4)
    with pytest.raises(ValueError, match="Run child has no step 0"):
        committer(child, 0)


def test_a_new_run_from_another_ones_weights_counts_from_one(parent: RunStore) -> None:
    child = child_of(parent, "next", 6, fork=False, trainer_state=False, cursor=False)
    origin = origin_of(child)
    assert origin is not None
    assert (start_of(child), origin.step, str(origin)) == (0, 6, "run@6")
    assert shared_weights(child) is None
    assert base_of(child, 3) == ReplayStart(version=0, weights=read_commit(parent, 6).version_out)
    take(child, 1, publish_version(child, 0))
    assert read_commit(child, 1).parent_digest == read_commit_digest(parent, 6)
    assert committer(child, 0) == (parent, 6)
    assert committer(child, -1) == (parent, 5)


def test_a_fork_of_a_fork(parent: RunStore) -> None:
    child = child_of(parent, "child", 4)
    take(child, 5, read_commit(parent, 4).version_out)
    grandchild = child_of(child, "grandchild", 5)
    assert [run.run for run, _ in ancestry(grandchild)] == ["grandchild", "child", "run"]
    assert committer(grandchild, 3) == (parent, 3)
    early = begin_at(child, 3, fork=True)  # a step that the child shares with its parent
    assert (early.run, early.step, early.at) == ("run", 3, 3)
    assert early.commit_digest == read_commit_digest(parent, 3)


def test_where_the_trainers_state_comes_from(parent: RunStore) -> None:
    assert base_of(parent, 1) is None
    assert base_of(parent, 5) == ReplayStart(version=4, run="run", step=4)
    child = child_of(parent, "child", 4)
    assert base_of(child, 5) == ReplayStart(version=4, run="run", step=4)
    between = child_of(parent, "between", 5)
    with pytest.raises(ObjectMissing, match="no snapshot of run@5, at which run between begins"):
        base_of(between, 5)
    snapshot(between, 5)
    assert base_of(between, 7) == ReplayStart(version=5, run="between", step=5)


def test_what_a_child_shares_stays(parent: RunStore) -> None:
    child = child_of(parent, "child", 3)
    for step in range(7, 11):
        take(parent, step, read_commit(parent, step - 1).version_out)
    snapshot(parent, 8)
    sweep(parent, keep_versions=1, keep_steps=1, keep_snapshots=1)
    assert snapshots(parent) == [2, 8]
    batches = {step: len(parent.store.list(parent.step_key(step))) > 1 for step in range(1, 11)}
    assert [step for step, there in batches.items() if there] == [3, 9, 10]
    assert shared_weights(child) == read_commit(parent, 3).version_out
    assert begin_at(parent, 3, fork=True).step == 3
    assert [(one.child, one.step, one.snapshot) for one in pins(parent)] == [("child", 3, 2)]


def test_the_state_that_a_fork_begins_with_stays_while_it_can_be_replayed(parent: RunStore) -> None:
    child = child_of(parent, "child", 3)
    before = read_commit(parent, 3).version_out
    snapshot(child, 3)
    for step in range(4, 9):
        before = take(child, step, before)
        if step % 2 == 0:
            snapshot(child, step)
    sweep(child, keep_versions=1, keep_steps=None, keep_snapshots=1)
    assert snapshots(child) == [3, 8]
    sweep(child, keep_versions=1, keep_steps=1, keep_snapshots=1)
    assert snapshots(child) == [8]


def test_a_child_that_was_deleted_keeps_nothing(
    parent: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = child_of(parent, "child", 3)
    child.store.delete(child.store.list("child"))
    assert len(pins(parent)) == 1  # it may be about to be written
    monkeypatch.setattr("storage.runs.retention.YOUNG", -1.0)
    assert pins(parent) == []
    sweep(parent, keep_versions=1, keep_steps=1, keep_snapshots=1)
    assert snapshots(parent) == [4]


def test_a_place_that_cannot_be_a_beginning_is_refused(parent: RunStore) -> None:
    with pytest.raises(NoSuchOrigin, match="Run run has no committed step 9: its last is 6"):
        begin_at(parent, 9, fork=True)
    with pytest.raises(NoSuchOrigin, match="Run empty has no committed step"):
        begin_at(RunStore(parent.store, "empty"), fork=True)
    sweep(parent, keep_versions=1, keep_steps=1, keep_snapshots=1)
    assert begin_at(parent, fork=True).step == 6
    with pytest.raises(NoSuchOrigin, match=r"trainer state of run@3 is no longer in the store"):
        begin_at(parent, 3, fork=True)
    with pytest.raises(NoSuchOrigin, match=r"policy version of run@3 is no longer in the store"):
        begin_at(parent, 3, fork=False, trainer_state=False)


def test_the_ledger_that_a_child_inherits_has_nothing_in_flight() -> None:
    ledger = Ledger(drawn=9, trained=6, dropped={"too long": 1}, in_flight=2)
    assert ledger.settled() == Ledger(drawn=7, trained=6, dropped={"too long": 1})


def test_a_damaged_origin_is_named(parent: RunStore) -> None:
    child = RunStore(parent.store, "odd")
    child.write_run({ORIGIN_FIELD: {"run": 3}})
    with pytest.raises(ObjectDamaged, match=r"odd/run\.json is no valid origin: "):
        origin_of(child)
