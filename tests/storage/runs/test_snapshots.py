"""Snapshots count once they are marked, and damage to them is found."""

from dataclasses import replace
from pathlib import Path

import pytest

from storage.audit.audit import Read, check_snapshot
from storage.objects.errors import ObjectDamaged, ObjectMissing, StoreError
from storage.runs.retention import clear
from storage.runs.run_store import RunStore
from storage.runs.snapshots import mark, read, snapshots


def test_a_marked_snapshot_counts(run: RunStore) -> None:
    run.store.write(f"{run.state_key(10)}/0.bin", b"state")
    assert snapshots(run) == []
    made = mark(run, 10)
    run.store.write(f"{run.state_key(20)}/0.bin", b"state")
    assert snapshots(run) == [10]
    assert run.state_steps() == [10, 20]
    assert read(run, 10) == made


def test_the_first_mark_stands(run: RunStore) -> None:
    run.store.write(f"{run.state_key(5)}/0.bin", b"state")
    first = mark(run, 5)
    run.store.write(f"{run.state_key(5)}/0.bin", b"another state")
    assert mark(run, 5) == first


def test_damage_names_the_file(run: RunStore) -> None:
    key = f"{run.state_key(5)}/0.bin"
    run.store.write(key, b"state of the trainer")
    mark(run, 5)
    path = Path(run.store.url(key).removeprefix("file://"))
    path.write_bytes(b"state")
    with pytest.raises(ObjectDamaged, match=r"0\.bin is damaged: 5 bytes of 20"):
        check_snapshot(run, run.state_key(5), Read())
    path.unlink()
    with pytest.raises(ObjectMissing, match=r"0\.bin"):
        check_snapshot(run, run.state_key(5), Read())


def test_nothing_is_no_snapshot(run: RunStore) -> None:
    with pytest.raises(StoreError, match="nothing below"):
        mark(run, 5)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_what_a_killed_flow_left_beyond_the_last_step_is_removed(run: RunStore, role: str) -> None:
    trained = replace(run, role=role)
    for step in (4, 5):
        run.store.write(f"{trained.state_key(step)}/0.bin", b"state")
        mark(trained, step)
    removed = clear(run, head=4)
    assert removed == [f"{trained.state_key(5)}/marker.json", f"{trained.state_key(5)}/0.bin"]
    assert snapshots(trained) == [4]


def test_what_a_killed_judge_was_asked_is_removed(run: RunStore) -> None:
    key = f"{run.questions_key}/1/questions.safetensors"
    run.store.write(key, b"questions")
    run.store.write(f"{run.run}/judged/00/11.json", b"an answer")
    assert clear(run, head=0) == [key]
    assert run.store.exists(f"{run.run}/judged/00/11.json")
