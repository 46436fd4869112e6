"""What every store does, whatever file system is under it."""

import pickle
import threading

import pytest

from storage.objects.errors import Conflict, ObjectMissing, StoreError
from storage.objects.store import Store


def test_what_is_written_is_read(store: Store) -> None:
    store.write("a/b/c.bin", b"hello")
    assert store.read("a/b/c.bin") == b"hello"
    assert store.size("a/b/c.bin") == 5
    store.write("a/b/c.bin", [b"he", b"", b"y"])
    assert store.read("a/b/c.bin") == b"hey"


def test_a_missing_object_is_named(store: Store) -> None:
    for call in (store.read, store.size, lambda key: store.read_ranges([(key, 0, 1)])):
        with pytest.raises(ObjectMissing, match=r"nowhere/x\.bin"):
            call("nowhere/x.bin")
    assert not store.exists("nowhere/x.bin")
    store.delete(["nowhere/x.bin"])


def test_ranges(store: Store) -> None:
    store.write("a", bytes(range(100)))
    store.write("b", bytes(range(100, 200)))
    found = store.read_ranges(
        [("a", 3, 5), ("b", 0, 1), ("a", 4, 4), ("a", 98, 200), ("a", 500, 600)]
    )
    assert [bytes(view) for view in found] == [b"\x03\x04", b"\x64", b"", b"\x62\x63", b""]


def test_an_object_is_created_once(store: Store) -> None:
    assert store.create("k", b"first")
    assert not store.create("k", b"second")
    assert store.read("k") == b"first"


def test_of_concurrent_creators_one_wins(store: Store) -> None:
    for number in range(5):
        start = threading.Barrier(8)
        won: list[int] = []

        def race(writer: int, key: str = f"race/{number}", start=start, won=won) -> None:
            start.wait()
            if store.create(key, b"%d" % writer):
                won.append(writer)

        threads = [threading.Thread(target=race, args=(writer,)) for writer in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert store.read(f"race/{number}") == b"%d" % won[0]


def test_compare_and_swap(store: Store) -> None:
    store.replace("HEAD", b"1", expected=None)
    with pytest.raises(Conflict):
        store.replace("HEAD", b"9", expected=None)
    store.replace("HEAD", b"2", expected=b"1")
    with pytest.raises(Conflict):
        store.replace("HEAD", b"3", expected=b"1")
    assert store.read("HEAD") == b"2"


def test_listing(store: Store) -> None:
    for key in ("r/w/v1/x", "r/w/v1/y", "r/w/v2/x", "r/run.json"):
        store.write(key, b"x")
    assert store.list("r/w") == ["r/w/v1/x", "r/w/v1/y", "r/w/v2/x"]
    assert store.children("r/w") == ["v1", "v2"]
    assert store.children("r") == ["run.json", "w"]
    assert store.list("none") == store.children("none") == []
    store.delete(["r/w/v1/x", "r/w/v1/y"])
    assert store.children("r/w") == ["v2"]


def test_sizes_of_many(store: Store) -> None:
    keys = {f"r/steps/1/rollout/{number}.bin": number for number in range(1, 6)}
    keys |= {"r/steps/2/rollout/1.bin": 7, "top": 0}
    for key, size in keys.items():
        store.write(key, b"x" * size)
    store.write("r/steps/1/rollout/more/1.bin", b"not asked for")
    assert store.sizes(keys) == keys
    assert store.sizes([]) == {}
    for missing in ("r/steps/1/rollout/9.bin", "r/steps/1/rollout/more", "r/steps/8/x.bin"):
        with pytest.raises(ObjectMissing, match=missing):
            store.sizes([*keys, missing])
    with pytest.raises(ObjectMissing, match=r"none/1\.bin"):
        store.sizes([f"none/{number}.bin" for number in range(1, 5)])


def test_sizes_below_a_folder(store: Store) -> None:
    store.write("a/b/1", b"one")
    store.write("a/2", b"twelve")
    store.write("ab/3", b"x")
    assert store.sizes_below("a") == {"a/2": 6, "a/b/1": 3}
    assert store.sizes_below("none") == {}


def test_a_stream_appears_at_its_end(store: Store) -> None:
    with store.write_stream("big") as out:
        out.write(b"one")
        assert not store.exists("big")
        out.write(b"two")
    assert store.read("big") == b"onetwo"
    with pytest.raises(RuntimeError, match="crash"), store.write_stream("half") as out:
        out.write(b"some")
        raise RuntimeError("crash")
    assert not store.exists("half")
    assert store.list() == ["big"]


def test_pickle_keeps_the_place(store: Store) -> None:
    store.write("k", b"v")
    copy = pickle.loads(pickle.dumps(store))
    assert copy == store
    assert copy.read("k") == b"v"


def test_keys_stay_inside(store: Store) -> None:
    for key in ("", "/etc/passwd", "a//b", "../x", "a/./b", "a/"):
        with pytest.raises(ValueError, match="relative POSIX path"):
            store.write(key, b"x")


def test_writable(store: Store) -> None:
    store.check_writable()
    assert store.list() == []


def test_an_unwritable_store_says_what_to_change(store: Store, tmp_path) -> None:
    if store.uri.startswith("memory"):
        pytest.skip("memory is always writable")
    (tmp_path / "file").write_text("")
    wrong = Store(f"file://{tmp_path}/file/store")
    if store.uri.startswith("s3"):
        wrong = Store("s3://no-such-bucket/x", store.options)
    with pytest.raises(StoreError, match=r"cannot be written.*Set store\.uri"):
        wrong.check_writable()
