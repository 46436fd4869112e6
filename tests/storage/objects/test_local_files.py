"""Local files: what a killed writer leaves, and two processes at once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from storage.objects import backends
from storage.objects.errors import StoreError
from storage.objects.store import Store

WRITER = """
import os, sys
import storage.objects.backends as backends
from storage.objects.store import Store

store = Store(sys.argv[1])
written = backends._WholeWrites.write

def slowly(file, chunk):
    written(file, memoryview(chunk)[: len(chunk) // 2])
    print("half", flush=True)
    sys.stdin.read()

backends._WholeWrites.write = slowly
{call}
"""


@pytest.mark.parametrize(
    "call",
    [
        'store.write("run/x.bin", b"n" * 10_000_000)',
        'store.create("run/new.bin", b"n" * 10_000_000)',
        'store.replace("run/x.bin", b"n" * 10_000_000, b"old")',
    ],
)
def test_a_killed_writer_leaves_nothing_to_read(store: Store, call: str) -> None:
    store.write("run/x.bin", b"old")
    program = WRITER.format(call=call)
    with subprocess.Popen(
        [sys.executable, "-c", program, store.uri], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=30)
    assert store.list() == ["run/x.bin"]
    assert store.children("run") == ["x.bin"]
    assert store.read("run/x.bin") == b"old"
    store.replace("run/x.bin", b"next", b"old")  # the killed writer's lock went with it
    assert store.read("run/x.bin") == b"next"


SWAPPER = """
import sys
from storage.objects.errors import Conflict
from storage.objects.store import Store

store, won = Store(sys.argv[1]), 0
while True:
    current = int(store.read("counter"))
    if current >= 200:
        break
    try:
        store.replace("counter", b"%d" % (current + 1), b"%d" % current)
        won += 1
    except Conflict:
        pass
print(won)
"""


def test_compare_and_swap_between_processes(store: Store) -> None:
    store.write("counter", b"0")
    writers = [
        subprocess.Popen([sys.executable, "-c", SWAPPER, store.uri], stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    wins = [int(writer.communicate(timeout=120)[0]) for writer in writers]
    assert store.read("counter") == b"200"
    assert sum(wins) == 200


def test_relative_addresses_mean_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store("file://.refrain/store")
    store.write("k", b"v")
    monkeypatch.chdir("/")
    assert store.read("k") == b"v"
    assert Store(f"{tmp_path}/.refrain/store").read("k") == b"v"
    assert store.url("k") == f"file://{tmp_path}/.refrain/store/k"


def test_empty_folders_go_with_their_last_object(store: Store, tmp_path: Path) -> None:
    store.write("run/a/b/x", b"1")
    store.write("run/c", b"2")
    store.delete(["run/a/b/x"])
    assert sorted(os.listdir(tmp_path / "store" / "run")) == ["c"]


def test_what_a_killed_writer_left_goes_with_its_folder(store: Store, tmp_path: Path) -> None:
    store.write("run/v1/x", b"1")
    store.write("run/v2/x", b"1")
    for folder, age in (("v1", 7200), ("v2", 60)):
        half = tmp_path / "store" / "run" / folder / ".y.0123.tmp"
        half.write_bytes(b"half")
        os.utime(half, (time.time() - age,) * 2)
    store.delete(["run/v1/x", "run/v2/x"])
    assert os.listdir(tmp_path / "store" / "run") == ["v2"]  # that one may still be written


def test_no_permission_is_one_sentence(store: Store) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    os.makedirs(store.url("").removeprefix("file://"), mode=0o500)
    with pytest.raises(StoreError, match="Could not write .*Permission denied"):
        store.write("k", b"v")


COMES_AND_GOES = """
import sys
from storage.objects.store import Store

store, name = Store(sys.argv[1]), sys.argv[2]
for number in range(1000):
    key = f"run/steps/1/environment/{name}-{number}.bin"
    assert store.create(key, b"new")
    assert store.read(key) == b"new"
    store.delete([key])
"""


def test_objects_that_come_and_go_in_one_folder_lose_none(store: Store) -> None:
    """Who deletes the last one removes the folder, while another process writes its first."""
    writers = [
        subprocess.Popen([sys.executable, "-c", COMES_AND_GOES, store.uri, f"w{number}"])
        for number in range(4)
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0] * 4


def test_a_folder_that_vanishes_while_it_is_made_is_made_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mkdir(exist_ok=True) finds a folder, and a moment later none: it says that one exists."""
    mkdir, said = Path.mkdir, [FileExistsError("folder"), FileNotFoundError("folder")]

    def vanishing(path: Path, *args: object, **kwargs: object) -> None:
        if said:
            raise said.pop()
        mkdir(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", vanishing)
    assert store.create("run/new.bin", b"new"), "and not: somebody was faster"
    assert store.read("run/new.bin") == b"new"


def test_a_file_is_given_all_of_a_large_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call of the system takes at most 2 GiB, and says so only by what it returns."""
    monkeypatch.setattr(backends, "AT_ONCE", 7)
    store, data = Store(str(tmp_path)), bytes(range(100))
    with store.write_stream("stream") as out:
        assert out.write(data) == 100
        assert out.write(memoryview(np.arange(6, dtype=np.int32).reshape(2, 3))) == 24
        assert out.write(np.zeros((0, 3)).data) == 0
    assert store.read("stream") == data + np.arange(6, dtype=np.int32).tobytes()
    store.write("whole", [data, data])
    assert store.create("created", data)
    assert (store.read("whole"), store.read("created")) == (2 * data, data)
