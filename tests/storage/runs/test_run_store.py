"""A run's keys and its markers."""

import pickle
from collections.abc import Callable

import pytest

from storage.objects.documents import Digester, digest, key_of
from storage.objects.errors import ObjectDamaged, StoreUnavailable
from storage.objects.store import Store
from storage.runs.run_store import FOLDERS, OwnRunStore, RunStore


def test_keys(run: RunStore) -> None:
    assert run.stage_key(12, "rollout", 3, "ab12") == "run/steps/000012/rollout/3-ab12.safetensors"
    assert run.commit_key(12) == "run/steps/000012/commit.json"
    assert run.weights_key(12) == "run/weights/v000012"
    assert run.state_key(10) == "run/state/000010"
    assert (run.run_json_key, run.head_key) == ("run/run.json", "run/HEAD")


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "../up", "with space"])
def test_names_that_fit_no_store(store: Store, name: str) -> None:
    with pytest.raises(ValueError, match="does not fit a store"):
        RunStore(store, name)


def test_run_json(run: RunStore) -> None:
    assert run.read_run() is None
    run.write_run({"seed": 3, "config": {"a": [1.5, None]}})
    assert run.read_run() == {"seed": 3, "config": {"a": [1.5, None]}}


def test_a_damaged_marker_is_noticed(run: RunStore) -> None:
    key = run.stage_key(1, "reward", 0, "k")
    run.finish(key, {"failures": 1})
    marker = "run/steps/000001/reward/0-k.json"
    data = run.store.read(marker)
    run.store.write(marker, data.replace(b'"failures": 1', b'"failures": 0'))
    with pytest.raises(ObjectDamaged, match=r"0-k\.json is damaged: its digest does not match"):
        run.finished(key)
    run.store.write(marker, data[:40])
    with pytest.raises(ObjectDamaged, match=r"0-k\.json is damaged: it is no refrain\.stage/1"):
        run.finished(key)
    run.store.write(run.run_json_key, data)
    with pytest.raises(ObjectDamaged, match=r"is a refrain\.stage/1 document, not refrain\.run/2"):
        run.read_run()


def test_of_its_own_run_a_store_lists_a_stage_once(
    run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, lost, later = (run.stage_key(1, "rollout", shard, "k") for shard in (1, 2, 3))
    run.finish(before, {"tokens": 1})
    own = OwnRunStore(run.store, run.run)
    asked: list[str] = []

    def counted(store: Store, what: str, key: str, action: Callable[..., object]) -> object:
        asked.append(what)
        return tried(store, what, key, action)

    tried = Store._try
    monkeypatch.setattr(Store, "_try", counted)
    for shard in range(4, 68):
        assert own.finished(run.stage_key(1, "rollout", shard, "k")) is None
    assert asked == ["list"]
    assert own.finished(before) == {"tokens": 1}
    assert own.finish(later, {"tokens": 3}) == own.finished(later) == {"tokens": 3}

    def created_unheard(store: Store, key: str, data: bytes) -> bool:
        create(store, key, data)
        raise StoreUnavailable("the answer was lost")

    create = Store.create
    with monkeypatch.context() as patched:
        patched.setattr(Store, "create", created_unheard)
        with pytest.raises(StoreUnavailable):
            own.finish(lost, {"tokens": 2})
    assert own.finished(lost) == {"tokens": 2}
    # What another process finished meanwhile is not seen, but stands.
    other = run.stage_key(1, "rollout", 99, "k")
    run.finish(other, {"tokens": 9})
    assert own.finished(other) is None
    assert own.finish(other, {"tokens": 8}) == own.finished(other) == {"tokens": 9}
    for step in range(2, FOLDERS + 3):
        own.finished(run.stage_key(step, "rollout", 1, "k"))
    assert len(own._listed) == FOLDERS
    assert own.finished(before) == {"tokens": 1}
    there = pickle.loads(pickle.dumps(own))
    assert type(there) is RunStore and there == run


def test_keys_of_inputs() -> None:
    assert key_of({"a": 1, "b": [2.5, "é"]}, 3) == key_of({"b": [2.5, "é"], "a": 1}, 3)
    assert key_of({"a": 1}) != key_of({"a": 2})
    assert len(key_of("x")) == 16
    with pytest.raises(TypeError):
        key_of(object())


def test_a_digest_in_pieces() -> None:
    pieces = Digester()
    pieces.update(b"ab")
    pieces.update(b"c")
    assert pieces.digest() == digest(b"abc") == "xxh3:06b05ab6733a618578af5f94892f3950"


def test_of_its_own_run_a_store_reads_what_never_changes_once(
    run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = OwnRunStore(run.store, run.run)
    assert own.constant("origin") is None, "run.json is not there yet"
    run.write_run({"config": {}, "origin": {"run": "parent"}})
    reads: list[str] = []

    def counted(store: Store, key: str) -> bytes:
        reads.append(key)
        return read(store, key)

    read = Store.read
    monkeypatch.setattr(Store, "read", counted)
    for _ in range(3):
        assert own.constant("origin") == {"run": "parent"}
        assert own.constant("opponent") is None
    assert reads == ["run/run.json"] * 2  # one for each field
    assert [run.constant("origin") for _ in range(2)] == [{"run": "parent"}] * 2
    assert reads == ["run/run.json"] * 4
