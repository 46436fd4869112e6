"""Snapshots count once they are marked, and damage to them is found."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from storage.objects.errors import ObjectDamaged, ObjectMissing, StoreError
from storage.runs.run_store import RunStore
from storage.runs.snapshots import address, check, latest, mark, read, snapshots
from storage.runs.weights import WeightsRef

POLICY = WeightsRef(version=10, key="run/weights/v000010", digest="xxh3:0", nbytes=1)


def saved(run: RunStore, step: int) -> None:
    dcp.save({"w": torch.arange(1000.0) + step}, checkpoint_id=address(run, step), no_dist=True)


@pytest.mark.filterwarnings("ignore")
def test_a_marked_snapshot_counts(run: RunStore) -> None:
    saved(run, 10)
    assert snapshots(run) == []
    made = mark(run, 10, POLICY)
    saved(run, 20)
    assert snapshots(run) == [10]
    assert read(run, 10) == made
    assert made.policy == POLICY
    check(run, made)
    state = {"w": torch.zeros(1000)}
    dcp.load(state, checkpoint_id=address(run, 10), no_dist=True)
    assert state["w"][5] == 15


def test_the_newest_that_is_not_too_new(run: RunStore) -> None:
    assert latest(run, 100) is None
    for step in (5, 10, 15):
        run.store.write(f"{run.state_key(step)}/0.distcp", b"state")
        mark(run, step, None)
    found = latest(run, 12)
    assert found is not None
    assert found.step == 10
    assert latest(run, 4) is None
    assert snapshots(run) == [5, 10, 15]


def test_the_first_mark_stands(run: RunStore) -> None:
    run.store.write(f"{run.state_key(5)}/0.distcp", b"state")
    first = mark(run, 5, POLICY)
    assert mark(run, 5, None) == first


def test_damage_names_the_file(run: RunStore) -> None:
    key = f"{run.state_key(5)}/__0_0.distcp"
    run.store.write(key, b"state of the trainer")
    made = mark(run, 5, None)
    plain = mark(RunStore(run.store, "run"), 5, None, digests=False)
    assert plain == made
    path = Path(run.store.url(key).removeprefix("file://"))
    path.write_bytes(b"stale of the trainer")
    with pytest.raises(ObjectDamaged, match=r"__0_0\.distcp is damaged: its digest"):
        check(run, made)
    path.write_bytes(b"state")
    with pytest.raises(ObjectDamaged, match="5 bytes of 20"):
        check(run, made)
    path.unlink()
    with pytest.raises(ObjectMissing, match=r"__0_0\.distcp"):
        check(run, made)


def test_nothing_is_no_snapshot(run: RunStore) -> None:
    with pytest.raises(StoreError, match="nothing below"):
        mark(run, 5, None)
