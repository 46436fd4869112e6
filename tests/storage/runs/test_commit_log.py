"""Steps are committed once, in order, and survive a writer's death at any point."""

import json
import logging
import threading

import pytest

from storage.batches.writing import write_batch
from storage.objects.errors import Conflict, ObjectDamaged, ObjectMissing
from storage.runs.commit_log import Commit, Ledger, commit, head, history, read_commit
from storage.runs.run_lease import LeaseLost, RunLease
from storage.runs.run_store import RunStore
from storage.runs.weights import WeightsRef


def version(number: int) -> WeightsRef:
    return WeightsRef(version=number, key=f"run/weights/v{number:06d}", digest="xxh3:0", nbytes=1)


def record(run: RunStore, step: int, reward: float = 0.5) -> Commit:
    ref = write_batch(run.store, run.stage_key(step, "reward", 0, "k"), {"reward": [reward, step]})
    return Commit(
        step=step,
        parent=step - 1,
        refs={"batch": ref},
        version_in=version(step - 1),
        version_out=version(step),
        cursor={"epoch": 0, "position": 8 * step},
        ledger=Ledger(drawn=8 * step, trained=6 * step, filtered=step, dropped={"timeout": step}),
        metrics={"reward/mean": reward, "kl": float("nan")},
        attempts=[{"stage": "rollout", "number": 2}],
    )


def test_a_commit_comes_back(run: RunStore) -> None:
    assert head(run) is None
    made = commit(run, record(run, 1))
    assert head(run) == 1
    found = read_commit(run, 1)
    assert found == made
    assert found.metrics == {"reward/mean": 0.5, "kl": None}
    assert found.refs["batch"].fetch_list(run.store, "reward") == [0.5, 1]
    assert found.objects == {"run/steps/000001/reward/0-k.safetensors"}
    with pytest.raises(ObjectMissing):
        read_commit(run, 2)


def test_a_repeated_commit_is_a_no_op(run: RunStore) -> None:
    first = commit(run, record(run, 1))
    assert commit(run, record(run, 1)) == first
    commit(run, record(run, 2))
    assert commit(run, record(run, 1)) == first
    assert head(run) == 2


def test_another_result_for_a_step_is_refused(run: RunStore) -> None:
    commit(run, record(run, 1))
    with pytest.raises(Conflict, match="Step 1 of run run is already committed with other results"):
        commit(run, record(run, 1, reward=0.75))
    assert read_commit(run, 1).metrics["reward/mean"] == 0.5


def test_steps_follow_each_other(run: RunStore) -> None:
    with pytest.raises(Conflict, match="follows step 1, but the last committed step is 0"):
        commit(run, record(run, 2))
    with pytest.raises(ValueError, match="Step 3 cannot follow step 1"):
        Commit(step=3, parent=1, version_in=version(0), version_out=version(1))


def test_a_writer_that_died_before_it_moved_head(
    run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(run, record(run, 1))

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("storage.runs.commit_log._advance", die)
        with pytest.raises(KeyboardInterrupt):
            commit(run, record(run, 2))
    assert json.loads(run.store.read(run.head_key))["body"]["step"] == 1
    assert head(run) == 2
    assert json.loads(run.store.read(run.head_key))["body"]["step"] == 2
    commit(run, record(run, 3))
    assert [made.step for made in history(run)] == [3, 2, 1]


def test_a_writer_that_died_before_the_commit(run: RunStore) -> None:
    record(run, 1)  # the data are there, the commit is not
    assert head(run) is None


def test_of_many_writers_one_commits(run: RunStore) -> None:
    results: list[str] = []
    records = [record(run, 1, reward=n / 8) for n in range(6)]
    start = threading.Barrier(len(records))

    def work(made: Commit) -> None:
        start.wait()
        try:
            commit(run, made)
            results.append("won")
        except Conflict:
            results.append("lost")

    threads = [threading.Thread(target=work, args=(made,)) for made in records]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["lost"] * 5 + ["won"]
    assert head(run) == 1


def test_history_notices_a_rewritten_commit(run: RunStore) -> None:
    for step in (1, 2, 3):
        commit(run, record(run, step))
    assert [made.step for made in history(run)] == [3, 2, 1]
    other = RunStore(run.store, "other")
    commit(other, record(other, 1, reward=0.9))
    run.store.write(run.commit_key(1), run.store.read(other.commit_key(1)))
    with pytest.raises(ObjectDamaged, match=r"steps/000001/commit\.json was altered"):
        list(history(run))


def test_a_later_versions_fields_are_noted(run: RunStore, caplog: pytest.LogCaptureFixture) -> None:
    from storage.objects import documents
    from storage.runs.commit_log import FORMAT

    body = commit(run, record(run, 1)).model_dump(mode="json") | {"energy": 3}
    run.store.write(run.commit_key(1), documents.encode(FORMAT, body))
    with caplog.at_level(logging.WARNING):
        assert read_commit(run, 1).step == 1
    assert "fields that this version does not know: energy" in caplog.text


def test_damaged_commits(run: RunStore) -> None:
    commit(run, record(run, 1))
    data = run.store.read(run.commit_key(1))
    run.store.write(run.commit_key(1), data.replace(b'"position": 8', b'"position": 9'))
    with pytest.raises(ObjectDamaged, match=r"commit\.json is damaged"):
        read_commit(run, 1)
    run.store.write(run.head_key, b"1")
    with pytest.raises(ObjectDamaged, match="run/HEAD is damaged"):
        head(run)


def test_a_ledger_balances() -> None:
    Ledger(drawn=8, trained=4, filtered=2, dropped={"timeout": 1}, in_flight=1)
    with pytest.raises(ValueError, match="does not balance: 8 prompts drawn, but 4 trained"):
        Ledger(drawn=8, trained=4)
    with pytest.raises(ValueError, match="does not balance"):
        Ledger(drawn=0, trained=1, dropped={"x": -1})


def test_a_writer_without_the_lease_commits_nothing(run: RunStore) -> None:
    old = RunLease.acquire(run, "old", ttl=60)
    commit(run, record(run, 1), old)
    assert read_commit(run, 1).epoch == 1
    old.release()
    new = RunLease.acquire(run, "new", ttl=60)
    with pytest.raises(LeaseLost):
        commit(run, record(run, 2), old)
    assert head(run) == 1
    commit(run, record(run, 2), new)
    assert read_commit(run, 2).epoch == 2
