"""The frozen version that plays against a run's own: where it is, and that it stays there."""

from __future__ import annotations

import pytest

from storage.objects.errors import ObjectDamaged
from storage.runs.commit_log import read_commit
from storage.runs.opponents import FIELD, Opponent, keep, opponent_of, recorded_opponent
from storage.runs.retention import pins, sweep
from storage.runs.run_store import RunStore
from tests.storage.runs.test_forks import publish_version, snapshot, take


@pytest.fixture
def other(run: RunStore) -> RunStore:
    """Six steps, with snapshots after 2 and 4."""
    run.write_run({"config": {}})
    version = publish_version(run, 0)
    for step in range(1, 7):
        version = take(run, step, version)
        if step in (2, 4):
            snapshot(run, step)
    return run


def against(other: RunStore, step: int, name: str = "child") -> RunStore:
    """A run whose opponent is a version of another one."""
    child = RunStore(other.store, name)
    opponent = Opponent.of(read_commit(other, step).version_out)
    child.write_run({"config": {}, FIELD: opponent.model_dump(mode="json")})
    keep(child, opponent)
    return child


def test_a_run_keeps_the_version_that_another_plays_against(other: RunStore) -> None:
    child = against(other, 2)
    found = opponent_of(child)
    assert (str(found), found.weights.version) == (f"{other.run}@2", 2)
    assert [(one.child, one.step, one.snapshot) for one in pins(other)] == [("child", 2, None)]
    sweep(other, keep_versions=1, keep_steps=1, keep_snapshots=1)
    assert 2 in other.versions()
    assert 1 not in other.versions()
    assert 2 not in other.state_steps(), "the weights alone are played with"
    child.store.delete([child.run_json_key])
    assert pins(other) != [], "a young one may not have been written yet"


def test_without_another_run_it_is_the_first_version(other: RunStore) -> None:
    assert recorded_opponent(other) is None
    assert opponent_of(other) == Opponent.of(read_commit(other, 1).version_in)
    sweep(other, keep_versions=1, keep_steps=None, keep_snapshots=1, tagged={0})
    assert 0 in other.versions()
    assert 3 not in other.versions()


def test_a_record_that_says_nothing_is_damage(run: RunStore) -> None:
    run.write_run({"config": {}, FIELD: {"run": 3}})
    with pytest.raises(ObjectDamaged, match="names no valid opponent"):
        recorded_opponent(run)
