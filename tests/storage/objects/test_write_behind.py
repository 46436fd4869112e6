"""What a machine has before the store: readable here at once, elsewhere once it is settled."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import torch

from storage.objects import node_cache
from storage.objects.errors import ObjectDamaged, ObjectMissing, StoreError, StoreUnavailable
from storage.objects.node_cache import (
    Behind,
    NodeCache,
    SyncBehind,
    WriteBehind,
    announced,
    open_behind,
)
from storage.objects.store import Store
from storage.objects.usage import COUNTER
from storage.runs.weights import (
    MANIFEST,
    WeightsRef,
    find_manifest,
    open_manifest,
    stream,
    wait_until_readable,
)
from storage.runs.weights_writing import (
    Contents,
    announce,
    contents,
    finish,
    outline_of,
    write_shard,
)

DATA = bytes(range(256)) * 40
TENSORS = {"a": torch.randn(40, 50), "b": torch.randn(30)}


class Gate:
    """Lets a store write streams, or not yet, or never."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.error: Exception | None = None
        self.begun: list[str] = []


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, real = Gate(), Store.write_stream

    @contextmanager
    def write_stream(store: Store, key: str) -> Iterator[IO[bytes]]:
        gate.begun.append(key)
        assert gate.open.wait(20)
        if gate.error is not None:
            raise gate.error
        with real(store, key) as out:
            yield out

    monkeypatch.setattr(Store, "write_stream", write_stream)
    yield gate
    gate.open.set()


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/store")


@pytest.fixture
def behind(memory: Store, tmp_path: Path) -> WriteBehind:
    return WriteBehind(memory, NodeCache(memory, tmp_path / "kept", 100_000))


def put(behind: WriteBehind, key: str, data: bytes = DATA) -> None:
    with behind.written(key, len(data)) as write:
        write(data[:1234])
        write(data[1234:])


def version(behind: Behind, store: Store, token: str, shift: float = 0.0) -> Contents:
    tensors = {name: tensor + shift for name, tensor in TENSORS.items()}
    outlines = {name: outline_of(tensor, None) for name, tensor in tensors.items()}
    name = f"model-{token}.safetensors"
    part = write_shard(store, "run/v", name, outlines, tensors.items(), behind)
    return contents("run/v", 3, [part], {"config.json": b"{}"})


def same(store: Store, ref: WeightsRef, cache: NodeCache | None) -> bool:
    read = dict(stream(store, ref, cache=cache))
    return all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def test_here_at_once_and_in_the_store_once_it_is_settled(
    behind: WriteBehind, memory: Store, gate: Gate
) -> None:
    before = COUNTER.total()
    put(behind, "a")
    put(behind, "b", DATA[::-1])
    assert not memory.exists("a")
    assert behind.cache.has("a")
    assert bytes(behind.cache.read_ranges([("a", 5, 99)])[0]) == DATA[5:99]
    gate.open.set()
    behind.settle()
    assert (memory.read("a"), memory.read("b")) == (DATA, DATA[::-1])
    assert gate.begun == ["a", "b"]
    assert COUNTER.total().bytes_written - before.bytes_written == 2 * len(DATA)


def test_the_store_fails(behind: WriteBehind, gate: Gate) -> None:
    gate.error = StoreUnavailable("no answer")
    gate.open.set()
    put(behind, "a")
    with pytest.raises(StoreUnavailable, match="no answer"):
        behind.settle()
    behind.settle()  # it was told of once


def test_an_attempt_that_is_given_up(behind: WriteBehind, memory: Store, gate: Gate) -> None:
    put(behind, "a")
    put(behind, "b")
    while not gate.begun:
        time.sleep(0.01)
    threading.Timer(0.05, gate.open.set).start()
    behind.abandon()
    assert memory.list() == ["a"]  # what was under way has ended, the rest does not begin
    behind.settle()


def test_what_does_not_fit_goes_straight(
    behind: WriteBehind,
    memory: Store,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate.open.set()
    put(behind, "large", DATA * 11)
    assert f"large ({11 * len(DATA)} bytes) goes to the store" in caplog.text
    assert "Set store.node_cache_gib higher" in caplog.text
    assert memory.read("large") == DATA * 11
    assert not behind.cache.has("large")

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(node_cache.os, "posix_fallocate", full)
    put(behind, "a")
    assert memory.read("a") == DATA
    assert not behind.cache.has("a")
    monkeypatch.undo()


def test_a_disk_that_fails_in_the_middle(
    behind: WriteBehind, memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(node_cache, "_write", broken)
    with pytest.raises(StoreError, match=r"Make room .* or set store.node_cache_gib = 0"):
        put(behind, "a")
    monkeypatch.undo()
    behind.settle()
    assert not memory.exists("a")
    assert not behind.cache.has("a")


def test_a_version_is_read_here_before_the_store_has_it(
    behind: WriteBehind, memory: Store, gate: Gate, tmp_path: Path
) -> None:
    made = version(behind, memory, "one")
    ref = announce(behind, made)
    assert wait_until_readable(memory, ref, behind.cache) < 5
    assert same(memory, ref, behind.cache)
    assert memory.list() == []

    elsewhere = NodeCache(memory, tmp_path / "other machine", 100_000)
    with pytest.raises(ObjectMissing, match=r"version 3 .* is not in the store 0 s after"):
        wait_until_readable(memory, ref, elsewhere, patience=0.0)
    waited: list[float] = []
    waiting = threading.Thread(
        target=lambda: waited.append(wait_until_readable(memory, ref, elsewhere))
    )
    waiting.start()
    gate.open.set()
    behind.settle()
    assert not memory.exists(f"run/v/{MANIFEST}")
    assert finish(memory, made) == ref
    waiting.join(20)
    assert waited
    assert same(memory, ref, elsewhere)
    assert same(memory, ref, None)


def test_a_version_of_which_the_machine_has_lost_a_part(
    behind: WriteBehind, memory: Store, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    made = version(behind, memory, "one")
    ref = announce(behind, made)
    behind.cache.forget("run/v/model-one.safetensors")
    with pytest.raises(ObjectMissing):
        wait_until_readable(memory, ref, behind.cache, patience=0.0)
    gate.open.set()
    behind.settle()  # its writer has the pages still
    finish(memory, made)
    assert "is read from the store" not in caplog.text
    wait_until_readable(memory, ref, behind.cache)
    assert f"{ref.key} is read from the store: this machine has lost a part of it" in caplog.text
    assert same(memory, ref, behind.cache)


def test_what_an_attempt_left_that_died(
    behind: WriteBehind, memory: Store, gate: Gate, tmp_path: Path
) -> None:
    dead = announce(behind, version(behind, memory, "dead", shift=1.0))
    again = WriteBehind(memory, behind.cache)
    made = version(again, memory, "one")
    with pytest.raises(ObjectDamaged):
        open_manifest(behind.cache, made.ref)  # the dead one's is still there
    with pytest.raises(ObjectMissing):
        wait_until_readable(memory, made.ref, behind.cache, patience=0.0)
    announce(behind, made)
    wait_until_readable(memory, made.ref, behind.cache)
    assert same(memory, made.ref, behind.cache)
    assert dead.digest != made.ref.digest
    gate.open.set()
    behind.abandon()
    again.settle()
    finish(memory, made)
    left = {key.rpartition("/")[2] for key in memory.list("run/v")}
    assert "model-dead.safetensors" not in left
    assert left == {
        "config.json",
        "manifest.json",
        "model-one.safetensors",
        "model.safetensors.index.json",
    }


def listed(store: Store) -> set[str]:
    return {key.rpartition("/")[2] for key in store.list("run/v")}


def test_a_version_of_a_local_store_is_read_before_the_disk_has_it(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest comes once the disk has all that it names: a machine's end takes all or nothing."""
    synced, order = threading.Event(), list[str]()
    real, create = Store.sync, Store.create

    def sync(store: Store, key: str) -> None:
        assert synced.wait(20)
        real(store, key)
        order.append(key)

    def noted(store: Store, key: str, data: bytes) -> bool:
        order.append(key)
        return create(store, key, data)

    monkeypatch.setattr(Store, "sync", sync)
    monkeypatch.setattr(Store, "create", noted)
    behind = SyncBehind(local)
    made = version(behind, local, "one")
    ref = announce(behind, made)
    assert same(local, ref, None)
    assert find_manifest(local, "run/v") is None, "it does not count yet"
    synced.set()
    behind.settle()
    assert finish(local, made) == ref
    assert order == ["run/v/model-one.safetensors", f"run/v/{MANIFEST}"]
    assert same(local, ref, None)
    assert announced(MANIFEST) not in listed(local)


def test_a_disk_that_fails_takes_the_version_with_it(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(handle: int) -> None:
        raise OSError(5, "Input/output error")

    behind = SyncBehind(local)
    monkeypatch.setattr("storage.objects.backends.os.fsync", sync)
    announce(behind, version(behind, local, "one"))
    with pytest.raises((StoreError, OSError), match="Input/output error"):
        behind.settle()
    assert find_manifest(local, "run/v") is None


def test_what_a_writer_left_in_a_local_store_that_died(local: Store) -> None:
    dead = announce(SyncBehind(local), version(SyncBehind(local), local, "dead", shift=1.0))
    behind = SyncBehind(local)
    made = version(behind, local, "one")
    with pytest.raises(ObjectDamaged):
        open_manifest(local, made.ref)  # the dead one's is still there
    assert announce(behind, made) != dead
    assert same(local, made.ref, None)
    behind.settle()
    finish(local, made)
    assert listed(local) == {
        "config.json",
        "manifest.json",
        "model-one.safetensors",
        "model.safetensors.index.json",
    }


def test_another_writer_was_faster(local: Store) -> None:
    behind = SyncBehind(local)
    first, late = (version(behind, local, token) for token in ("first", "late"))
    finish(local, first)
    announce(behind, late)
    behind.settle()
    assert finish(local, late) == first.ref
    assert listed(local) == {
        "config.json",
        "manifest.json",
        "model-first.safetensors",
        "model.safetensors.index.json",
    }


def test_which_stores_are_written_behind(local: Store, memory: Store, tmp_path: Path) -> None:
    kept = NodeCache(memory, tmp_path / "kept", 1000)
    assert isinstance(open_behind(local, None), SyncBehind)
    assert isinstance(open_behind(memory, kept), WriteBehind)
    assert open_behind(memory, None) is None
