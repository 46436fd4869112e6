"""What a machine keeps of a remote store: read once by all its processes, bounded, replaced if bad."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest
import torch

from storage.objects import node_cache
from storage.objects.errors import ObjectMissing
from storage.objects.node_cache import NodeCache, open_node_cache
from storage.objects.store import Store
from storage.objects.usage import COUNTER
from storage.runs.weights import BaseVersion, open_manifest, stream
from storage.runs.weights_writing import publish

DATA = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_cache, "CHUNK", 1000)
    monkeypatch.setattr("storage.objects.store.GAP_BYTES", 0)


@pytest.fixture
def cache(memory: Store, tmp_path: Path) -> NodeCache:
    memory.write("a", DATA)
    return NodeCache(memory, tmp_path / "kept", 30_000)


def bytes_read(work: object) -> int:
    before = COUNTER.total().bytes_read
    work()  # type: ignore[operator]
    return COUNTER.total().bytes_read - before


def test_only_what_is_asked_for_and_only_once(cache: NodeCache) -> None:
    wanted = [("a", 1500, 3100), ("a", 10_000, 10_240), ("a", 7, 7), ("a", 10_200, 99_999)]

    def read() -> None:
        found = [bytes(view) for view in cache.read_ranges(wanted)]
        assert found == [DATA[start:stop] for _, start, stop in wanted]

    assert bytes_read(read) == 3000 + 240
    assert bytes_read(read) == 0
    with pytest.raises(ObjectMissing):
        cache.read_ranges([("b", 0, 5)])


def test_what_a_reader_changes_is_its_own(cache: NodeCache) -> None:
    (mine,) = cache.read_ranges([("a", 0, 4)])
    mine[:4] = b"mine"
    assert bytes(cache.read_ranges([("a", 0, 4)])[0]) == DATA[:4]


def test_it_is_bounded(cache: NodeCache, memory: Store, tmp_path: Path) -> None:
    for name in "bcd":
        memory.write(name, DATA)
        cache.read_ranges([(name, 0, 10)])
        cache.read_ranges([("a", 0, 10)])  # stays in use
    held = sum(path.stat().st_blocks * 512 for path in (tmp_path / "kept").iterdir())
    assert held <= 30_000
    assert len(list((tmp_path / "kept").iterdir())) == 2
    assert bytes_read(lambda: cache.read_ranges([("a", 0, 10)])) == 0
    memory.write("large", DATA * 3)
    assert bytes(cache.read_ranges([("large", 5, 9)])[0]) == (DATA * 3)[5:9]
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_many_at_once_read_once(cache: NodeCache, memory: Store, tmp_path: Path) -> None:
    """Each with files of its own, as processes have them."""
    found: list[bytes] = []

    def read() -> None:
        mine = NodeCache(memory, tmp_path / "kept", 30_000)
        for start in range(0, len(DATA), 700):
            stop = min(start + 700, len(DATA))
            (view,) = mine.read_ranges([("a", start, stop)])
            if bytes(view) != DATA[start:stop]:
                found.append(bytes(view))

    def all_of_them() -> None:
        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert bytes_read(all_of_them) == len(DATA)
    assert found == []


def test_a_process_that_dies_with_the_lock_stops_nobody(cache: NodeCache, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held = context.Event()
    process = context.Process(target=_hold, args=(cache._path("a"), held))
    process.start()
    assert held.wait(20)
    process.kill()
    process.join()
    assert bytes(cache.read_ranges([("a", 0, 5)])[0]) == DATA[:5]


def _hold(path: Path, held: object) -> None:
    with node_cache._locked(path):
        held.set()  # type: ignore[attr-defined]
        threading.Event().wait()


def test_none_for_local_files(store: Store, memory: Store) -> None:
    assert open_node_cache(store, 10**9) is None
    assert open_node_cache(memory, 0) is None


def test_versions_come_through_it(memory: Store, tmp_path: Path) -> None:
    tensors = {name: torch.randn(40, 50) for name in "abc"}
    base = publish(memory, "run", 0, tensors.items(), {}, torch.bfloat16)
    tensors["b"] = tensors["b"] + (torch.rand(40, 50) < 0.03)
    named = BaseVersion(key=base.key, digest=base.digest)
    ref = publish(memory, "run", 1, tensors.items(), {}, torch.bfloat16, base=named)
    cache = NodeCache(memory, tmp_path / "kept", 100_000)
    manifests = sum(memory.size(f"{one.key}/manifest.json") for one in (base, ref))

    def read() -> None:
        for name, tensor in stream(memory, ref, cache=cache):
            assert torch.equal(tensor, tensors[name].bfloat16())

    (file,) = open_manifest(memory, base).files.keys() - {"model.safetensors.index.json"}
    assert bytes_read(read) == manifests + memory.size(f"{base.key}/{file}") + (ref.stored or 0)
    assert bytes_read(read) == manifests
    kept = cache._path(f"{base.key}/{file}")
    data = bytearray(kept.read_bytes())
    data[700] ^= 1
    kept.write_bytes(data)
    assert bytes_read(read) > manifests  # the machine's copy was damaged, the store's is not
    assert not kept.exists()


def test_what_is_kept_while_it_is_written(cache: NodeCache, memory: Store) -> None:
    with cache.kept("b", len(DATA)) as keep:
        keep.put(DATA[:1234])
        assert not cache.has("b")
        keep.put(DATA[1234:])
    assert cache.has("b")
    with pytest.raises(RuntimeError), cache.kept("c", len(DATA)) as keep:
        keep.put(DATA[:5000])
        raise RuntimeError
    assert not cache.has("c")  # nothing of the writing that failed
    assert not cache._path("c").exists()
    assert cache.read("a") == DATA  # the store's
    cache.put("small", b"x")
    assert cache.read("small") == b"x"
    cache.put("small", b"yz")
    assert cache.read("small") == b"yz"
    assert not memory.exists("small")
