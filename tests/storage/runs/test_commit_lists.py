"""Commits of large steps stay small; their lists are kept beside, and commits of before are read."""

from pathlib import Path

import pytest

from storage.audit.audit import audit
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.errors import ObjectDamaged, ObjectMissing
from storage.objects.usage import COUNTER
from storage.runs import commit_log
from storage.runs.commit_log import (
    Commit,
    commit,
    history,
    read_commit,
    read_commit_digest,
    read_outline,
)
from storage.runs.retention import orphans, sweep
from storage.runs.run_store import RunStore
from tests.storage.audit import small_run
from tests.storage.runs.test_commit_log import version

STORED = Path(__file__).with_name("stored")


def large(run: RunStore, step: int, shards: int) -> Commit:
    """A step of so many shards, each with an attempt and a dropped row."""
    refs = [
        write_batch(run.store, run.stage_key(step, "reward", shard, "k"), {"reward": [0.5, shard]})
        for shard in range(shards)
    ]
    return Commit(
        step=step,
        parent=step - 1,
        refs={"batch": BatchRef.concat(refs)},
        version_in=version(step - 1),
        version_out=version(step),
        dropped_rows={"too long": list(range(shards))},
        attempts=[{"stage": "reward", "shard": n, "worker": "cpu-0"} for n in range(shards)],
    )


def test_a_commit_is_small_whatever_its_step(run: RunStore) -> None:
    small, made = commit(run, large(run, 1, 4)), commit(run, large(run, 2, 600))
    assert small.lists is None
    assert made.lists is not None and made.lists.nbytes > 80_000
    assert run.store.size(run.commit_key(2)) < run.store.size(run.commit_key(1)) < 10_000
    assert read_commit(run, 2) == made
    assert read_commit(run, 2).refs["batch"].verify(run.store) is None
    assert [one.step for one in history(run)] == [2, 1]
    assert commit(run, large(run, 2, 600)) == made  # a retry after a lost answer


def test_an_outline_is_one_read(run: RunStore) -> None:
    made = commit(run, large(run, 1, 600))
    assert made.lists is not None
    before = COUNTER.total()
    outline = read_outline(run, 1)
    assert (COUNTER.total() - before).requests == 1
    assert (outline.version_out, outline.rows) == (made.version_out, {"batch": 1200})
    run.store.delete([made.lists.key])
    assert read_outline(run, 1) == outline
    with pytest.raises(ObjectMissing, match=made.lists.key):
        read_commit(run, 1)


def test_the_chain_vouches_for_the_lists(run: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log, "INLINE_BYTES", 0)
    small_run.make(run)
    assert audit(run).good and audit(run).orphans == []
    lists, other = (read_commit(run, step).lists for step in (2, 3))
    assert lists is not None and other is not None
    run.store.write(lists.key, run.store.read(other.key))
    with pytest.raises(ObjectDamaged, match=rf"{lists.key} is damaged: its digest is xxh3:"):
        read_commit(run, 2)
    problems = [f"{one.kind} {one.step}: {one.message}" for one in audit(run).problems]
    assert any(one.startswith(f"chain 2: Object {lists.key} is damaged") for one in problems)


def test_lists_stay_when_retention_removes_the_batches(
    run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "INLINE_BYTES", 0)
    small_run.make(run, steps=6, snapshots=(2, 4))
    assert any("/000001/rollout/" in key for key in sweep(run, 1, 1, 1))
    assert [one.dropped_rows for one in history(run)][3] == {"prompt too long": [99]}
    found = audit(run)
    assert (found.good, found.orphans) == (True, [])


def test_lists_of_a_commit_that_lost_are_an_orphan(
    run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "INLINE_BYTES", 0)
    small_run.make(run, steps=2)
    body = read_commit(run, 2).model_dump(mode="json") | {"attempts": [{"stage": "x"}]}
    lost = commit_log._detach(run, 2, body)["lists"]
    assert isinstance(lost, dict)
    assert orphans(run, 2) == audit(run).orphans == [lost["key"]]


def test_commits_of_version_1_are_read(run: RunStore) -> None:
    """As Refrain wrote them before commits were bounded; the batches that they name are gone."""
    for step, name in ((1, "commit-1.json"), (2, "commit-1-next.json")):
        run.store.write(run.commit_key(step), (STORED / name).read_bytes())
    first, second = read_commit(run, 1), read_commit(run, 2)
    assert first.lists is None
    assert (first.rows, first.dropped_rows) == (
        {"prompts": 2, "samples": 6, "batch": 6},
        {"prompt too long": [99]},
    )
    assert (first.first_group, first.group_size) == (None, None)
    assert second.parent_digest == read_commit_digest(run, 1)
    assert read_outline(run, 2).rows == second.rows
    assert [one.step for one in history(run)] == [2, 1]
    third = small_run.take(run, 3, second)
    assert third.parent_digest == read_commit_digest(run, 2)
