"""What a machine keeps of a remote store: read once by all its processes, bounded, replaced if bad."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest
import torch

from storage.objects import node_cache
from storage.objects.digests import digest
from storage.objects.errors import ObjectMissing
from storage.objects.node_cache import NodeCache, open_node_cache
from storage.objects.store import Store
from storage.objects.usage import COUNTER
from storage.runs.weights import Base, open_manifest
from storage.runs.weights_reading import stream
from storage.runs.weights_writing import outline_of, publish, write_shard

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
    named = Base(key=base.key, digest=base.digest)
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


def test_what_is_written_here_need_not_be_read_back(
    cache: NodeCache, memory: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(key: str, *pieces: bytes) -> None:
        with cache.kept(key, len(DATA)) as keep, memory.write_stream(key) as out:
            for piece in pieces:
                out.write(piece)
                keep(piece)

    def read(key: str) -> int:
        def look() -> None:
            assert bytes(cache.read_ranges([(key, 0, len(DATA))])[0]) == DATA

        return bytes_read(look)

    write("b", DATA[:1234], DATA[1234:])
    assert read("b") == 0
    with pytest.raises(RuntimeError), cache.kept("c", len(DATA)) as keep:
        keep(DATA[:5000])
        raise RuntimeError
    memory.write("c", DATA)
    assert read("c") == len(DATA)  # nothing of the writing that failed

    def full(*given: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(node_cache, "_write", full)
    write("d", DATA)
    monkeypatch.undo()
    assert memory.read("d") == DATA
    assert read("d") == len(DATA)


def test_a_published_version_is_on_its_writers_machine(memory: Store, tmp_path: Path) -> None:
    cache = NodeCache(memory, tmp_path / "kept", 100_000)
    tensors = {"a": torch.randn(40, 50), "b": torch.randn(30)}
    outlines = {name: outline_of(tensor, None) for name, tensor in tensors.items()}
    part = write_shard(memory, "run/v", "model.safetensors", outlines, tensors.items(), cache)
    key = "run/v/model.safetensors"

    def read() -> None:
        (view,) = cache.read_ranges([(key, 0, part.file.nbytes)])
        assert digest(view) == part.file.digest

    assert bytes_read(read) == 0
