"""A run's keys and its markers."""

import pytest

from storage.objects.digests import Digester, digest, key_of
from storage.objects.errors import ObjectDamaged
from storage.objects.store import Store
from storage.runs.run_store import RunStore


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
