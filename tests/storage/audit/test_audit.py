"""What an audit finds: nothing in a good run, and each kind of damage by name."""

from pathlib import Path

import pytest

from storage.audit.audit import Audit, audit
from storage.batches.writing import write_batch
from storage.objects import documents
from storage.runs.commit_log import FORMAT, Commit, read_commit
from storage.runs.forks import begin_at, pin
from storage.runs.retention import orphans, sweep
from storage.runs.run_store import RunStore
from tests.storage.audit import small_run


@pytest.fixture
def good(run: RunStore) -> RunStore:
    small_run.make(run)
    return run


def messages(found: Audit) -> list[str]:
    return [f"{problem.kind} {problem.step}: {problem.message}" for problem in found.problems]


def path_of(run: RunStore, key: str) -> Path:
    return Path(run.store.url(key).removeprefix("file://"))


def flip(run: RunStore, key: str, place: int = -1) -> None:
    """Change one bit of a stored object."""
    data = bytearray(path_of(run, key).read_bytes())
    data[place] ^= 1
    path_of(run, key).write_bytes(data)


def rewrite(run: RunStore, step: int, change: dict[str, object]) -> None:
    """Put another commit in a step's place, with a digest of its own that is right."""
    body = read_commit(run, step).model_dump(mode="json") | change
    run.store.write(run.commit_key(step), documents.encode(FORMAT, body))


def test_a_good_run(good: RunStore) -> None:
    found = audit(good)
    assert messages(found) == []
    assert found.good
    assert found.orphans == found.unfinished == []
    assert [one.step for one in found.steps] == [1, 2, 3, 4]
    assert found.steps[2].dropped == {"prompt too long": 1}
    assert (found.steps[2].drawn, found.steps[2].trained, found.steps[2].filtered) == (7, 5, 1)
    assert all(one.recounted for one in found.steps)
    assert (found.versions, found.snapshots) == (5, 1)
    assert found.read.nbytes > 10_000


@pytest.mark.parametrize("place", [20, -1])
def test_a_flipped_bit_in_a_batch(good: RunStore, place: int) -> None:
    key = good.stage_key(2, "rollout", 1, "k")
    flip(good, key, place)
    (message,) = messages(audit(good))
    assert message.startswith(f"batch 2: Object {key} is damaged: ")


def test_a_flipped_bit_in_a_version(good: RunStore) -> None:
    (key,) = [k for k in good.store.list(good.weights_key(3)) if k.endswith("0.safetensors")] or [
        k for k in good.store.list(good.weights_key(3)) if "model-" in k
    ]
    flip(good, key)
    found = audit(good)
    assert messages(found) == [f"weights 3: Object {key} is damaged: its digest does not match."]
    assert found.orphans == []


def test_a_flipped_bit_in_a_snapshot(good: RunStore) -> None:
    key = f"{good.state_key(2)}/rank.safetensors"
    flip(good, key)
    assert messages(audit(good)) == [
        f"state 2: Object {key} is damaged: the digest of tensor 'model.w' does not match."
    ]


def test_a_missing_object(good: RunStore) -> None:
    key = good.stage_key(4, "advantage", 1, "k")
    good.store.delete([key])
    (message,) = messages(audit(good))
    assert message.startswith("batch 4:") and key in message and "does not exist" in message


def test_a_missing_last_version(good: RunStore) -> None:
    good.store.delete(good.store.list(good.weights_key(4)))
    (message,) = messages(audit(good))
    assert message == "weights 4: Policy version 4 of run run is missing: there is no manifest."


def test_an_orphan(good: RunStore) -> None:
    late = write_batch(good.store, good.stage_key(2, "rollout", 2, "late"), {"reward": [1.0]})
    (key,) = late.objects
    good.finish(key, {"ref": late.to_json()})
    good.store.write("run/weights/v000002/model-00001-dead.safetensors", b"a writer died")
    for name in ("MLmodel", "requirements.txt", "components/tokenizer/tokenizer.json"):
        good.store.write(f"run/weights/v000002/{name}", b"by which MLflow loads it from a bucket")
    good.store.write("run/weights/v000002/tokenizer/tokenizer.json", b"whose?")
    good.store.write("run/notes.txt", b"whose?")
    found = audit(good)
    assert found.good
    assert found.orphans == [
        "run/notes.txt",
        key.replace(".safetensors", ".json"),
        key,
        "run/weights/v000002/model-00001-dead.safetensors",
        "run/weights/v000002/tokenizer/tokenizer.json",
    ]
    # What a resumed run removes of steps in which a flow has died; a marker goes with its data.
    assert {*orphans(good, 4)} == {*found.orphans[2:]}


def test_a_step_under_way_is_no_orphan(good: RunStore) -> None:
    key = good.stage_key(5, "rollout", 1, "k")
    write_batch(good.store, key, {"reward": [1.0]})
    small_run.publish_version(good, 5)
    found = audit(good)
    assert found.good
    assert found.orphans == []
    assert key in found.unfinished
    assert good.weights_key(5) + "/manifest.json" not in found.orphans


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"ledger": {"drawn": 6, "trained": 4}}, "does not balance"),
        (
            {"ledger": {"drawn": 7, "trained": 7}},
            "counts 3 prompts trained, but its batch holds the samples of 1",
        ),
        (
            {"ledger": {"drawn": 8, "trained": 5, "filtered": 3}},
            "counts 4 prompts drawn, but its data cursor moved by 3",
        ),
        ({"dropped_rows": {}}, "counts 3 prompts drawn, but stored 2 and named 0"),
        ({"first_group": 5}, "numbered from 5, but its prompts are 4 to 5"),
        ({"group_size": 2}, "groups have 2 samples, but the numbers of its samples are others"),
        (
            {"rows": {"prompts": 2, "samples": 7, "batch": 3}},
            "'samples': 7, 'batch': 3} rows, but they have",
        ),
    ],
)
def test_a_ledger_that_the_batches_do_not_bear_out(
    run: RunStore, change: dict[str, object], expected: str
) -> None:
    small_run.make(run, steps=3)
    rewrite(run, 3, change)
    found = messages(audit(run))
    assert any(expected in message for message in found), found


def test_an_altered_commit_breaks_the_chain(good: RunStore) -> None:
    rewrite(good, 2, {"committed_at": 1.0})
    (message,) = messages(audit(good))
    assert message.startswith("chain 3: Object run/steps/000002/commit.json was altered: ")
    rewrite(good, 4, {"committed_at": 1.0})
    assert "HEAD says" in messages(audit(good))[-1]


def test_a_damaged_commit_and_one_that_is_gone(good: RunStore) -> None:
    flip(good, good.commit_key(2), 200)
    assert any(
        message.startswith("chain 2: Object run/steps/000002") for message in messages(audit(good))
    )
    good.store.delete([good.commit_key(2)])
    assert any("000002/commit.json does not exist" in message for message in messages(audit(good)))


def test_a_sample_whose_engine_held_other_weights(run: RunStore) -> None:
    first = small_run.take(run, 1)
    other = first.version_out.model_copy(update={"digest": "xxh3:other"})
    small_run.take(run, 2, first, sampled_with=other, version_in=first.version_out)
    (message,) = messages(audit(run))
    assert message.startswith("sample 2: Samples of step 2 name policy version 1, whose digest is")
    assert message.endswith("but their engine held xxh3:other.")


def test_a_first_epoch_of_unseen_rows_only(run: RunStore) -> None:
    small_run.begin(run)
    cursor = {"epoch": 0, "size": 9, "fresh": 3, "position": 2}
    first = small_run.take(run, 1, cursor=cursor)
    second = small_run.take(run, 2, first, cursor=cursor | {"epoch": 1, "position": 1})
    small_run.take(run, 3, second, cursor=cursor | {"epoch": 1, "position": 3})
    assert messages(audit(run)) == []


def test_what_retention_removed_is_no_problem(run: RunStore) -> None:
    small_run.make(run, steps=8, snapshots=(2, 4, 6))
    removed = sweep(run, keep_versions=1, keep_steps=1, keep_snapshots=1)
    found = audit(run)
    assert messages(found) == []
    assert found.orphans == []
    assert found.removed > 0 and removed
    assert [one.recounted for one in found.steps] == [False] * 6 + [True] * 2
    assert found.without == {1, 2, 3, 4, 5, 6}


def test_a_fork_is_audited_across_the_border(good: RunStore) -> None:
    child = RunStore(good.store, "child")
    origin = begin_at(good, 3, fork=True)
    small_run.begin(child, origin)
    pin(child, origin)
    before = read_commit(good, 3)
    made = small_run.take(child, 4, before)
    assert isinstance(made, Commit)
    found = audit(child)
    assert messages(found) == []
    assert (found.origin, [one.drawn for one in found.steps]) == ("run@3", [9])
    assert audit(good).good
    rewrite(good, 3, {"committed_at": 1.0})
    assert "origin None: The commit of run@3 was altered since child began there." in messages(
        audit(child)
    )
    good.store.delete(good.store.list(good.weights_key(3)))
    assert any(
        "weights of run@3, which child shares, are gone" in m for m in messages(audit(child))
    )
    assert "weights 3: Policy version 3 of run run is missing: there is no manifest." in messages(
        audit(good)
    )


def test_a_fork_at_a_version_that_retention_had_removed(good: RunStore) -> None:
    """It makes the version again, of the trainer's state; neither run misses anything."""
    good.store.delete(good.store.list(good.weights_key(2)))
    child = RunStore(good.store, "child")
    origin = begin_at(good, 2, fork=True)
    small_run.begin(child, origin)
    pin(child, origin)
    own = small_run.publish_version(child, 2)
    small_run.take(child, 3, read_commit(good, 2), sampled_with=own)
    child.store.delete(child.store.list(child.weights_key(2)))  # retention, later
    assert messages(audit(child)) == []
    assert messages(audit(good)) == []


def test_a_fork_whose_parents_state_is_gone(good: RunStore) -> None:
    child = RunStore(good.store, "child")
    origin = begin_at(good, 3, fork=True)
    small_run.begin(child, origin)
    before = read_commit(good, 3)
    small_run.take(child, 4, before)
    good.store.delete(good.store.list("run/state"))
    good.store.delete(good.store.list("run/steps/000001/advantage"))
    (message,) = messages(audit(child))
    assert message.startswith("origin None: The trainer state of run@3, which child needs, is gone")
    small_run.snapshot(child, 4)
    assert messages(audit(child)) == []  # it has a state of its own by now


def test_a_run_without_a_commit(run: RunStore) -> None:
    small_run.begin(run)
    assert audit(run).good
