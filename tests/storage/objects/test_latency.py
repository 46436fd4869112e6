"""How long a store takes, by operation."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.objects.errors import ObjectMissing
from storage.objects.store import Store
from storage.objects.usage import BOUNDS, LATENCIES, Latencies, Latency


def test_tries_are_counted_by_their_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0005, 10.0, 10.3, 20.0, 90.0])
    monkeypatch.setattr("storage.objects.usage.time.perf_counter", lambda: next(clock))
    counted = Latencies()
    for _ in range(3):
        with counted.timed("read"):
            pass
    (found,) = counted.total().values()
    by_bound = dict(zip([*BOUNDS, float("inf")], found.counts, strict=True))
    assert {bound: n for bound, n in by_bound.items() if n} == {0.001: 1, 0.5: 1, float("inf"): 1}
    assert found.seconds == pytest.approx(70.3005)
    assert found.failures == 0
    assert found - found == Latency()


def test_an_object_that_is_missing_is_no_failure() -> None:
    counted = Latencies()
    for error in (FileNotFoundError, FileExistsError, ConnectionError):
        with pytest.raises(error), counted.timed("read"):
            raise error
    assert counted.total()["read"].failures == 1
    assert sum(counted.total()["read"].counts) == 3


def test_what_a_store_does_is_counted(tmp_path: Path) -> None:
    before = LATENCIES.total()
    store = Store(str(tmp_path))
    store.write("a", b"1")
    store.read("a")
    with store.write_stream("b") as file:
        file.write(b"2")
    store.sizes(["a"])
    with pytest.raises(ObjectMissing):
        store.read("c")
    more = {
        name: sum((one - before.get(name, Latency())).counts)
        for name, one in LATENCIES.total().items()
    }
    assert {name: n for name, n in more.items() if n} == {
        "write": 1, "read": 2, "open": 1, "close": 1, "look_up": 1,
    }  # fmt: skip
