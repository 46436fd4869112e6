"""Parts are spread over workers, come back in their order, and are made once."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.failures import WorkerLost
from engines.workers.devices import DeviceTime
from engines.workers.engine import CallId, Engine
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tasks.run.attempts import AttemptLog
from tasks.run.stage import Part, discard, slices, spread


class Squares(Engine):
    """Writes squares."""

    @abstractmethod
    def square(self, number: int, out_key: str) -> BatchRef:
        """Write one."""


class Pool:
    """Two workers that write one number each time; `broken`: the part that fails once."""

    def __init__(self, store: Store, broken: int | None = None) -> None:
        self.store, self.broken = store, broken
        self.made: list[int] = []
        self.at_once = self.most = 0
        self.lock = threading.Lock()

    def live(self) -> dict[str, str]:
        return {"cpu-0": "tcp://a", "cpu-1": "tcp://b"}

    def call(
        self, method: Any, call_id: CallId, assignment: Any, number: int, out_key: str
    ) -> BatchRef:
        assert method is Squares.square
        assert call_id.call == f"square-{out_key}"
        with self.lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        try:
            if number == self.broken:
                self.broken = None
                raise WorkerLost("worker cpu-0", "it is gone")
            with self.lock:
                self.made.append(number)
            return write_batch(self.store, out_key, {"number": [number**2]})
        finally:
            with self.lock:
                self.at_once -= 1


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("tasks.run.attempts.get_run_logger", lambda: logging.getLogger("parts"))
    files = RunStore(Store(str(tmp_path)), "run")
    return SimpleNamespace(
        name="run",
        files=files,
        attempts=AttemptLog(),
        device_time=DeviceTime(),
        tell=lambda event: None,
        call_id=lambda step, call: CallId(run="run", epoch=1, step=step, call=call),
    )


def parts(run: Any, pool: Any, count: int) -> list[Part[BatchRef]]:
    keys = [run.files.stage_key(1, "squares", n, "key") for n in range(count)]
    return [Part.of(pool, Squares.square, number=n, out_key=key) for n, key in enumerate(keys)]


def numbers(store: Store, refs: list[BatchRef]) -> list[int]:
    return [int(ref.fetch_numpy(store, "number")[0][0]) for ref in refs]


def test_parts_come_in_their_order_and_are_made_once(run: Any) -> None:
    pool = Pool(run.files.store)
    for _ in range(2):  # as a resumed run would
        found = spread(run, 1, "squares", parts(run, pool, 7), BatchRef)
        assert numbers(run.files.store, found) == [n**2 for n in range(7)]
    assert sorted(pool.made) == list(range(7))
    assert pool.most <= 2  # one on each worker
    assert sorted(attempt.shard for attempt in run.attempts.of(1)) == [*range(1, 8)]


def test_a_retry_makes_what_is_left(run: Any) -> None:
    pool = Pool(run.files.store, broken=3)
    with pytest.raises(WorkerLost, match="cpu-0"):
        spread(run, 1, "squares", parts(run, pool, 40), BatchRef)
    before = len(pool.made)
    assert before < 40
    found = spread(run, 1, "squares", parts(run, pool, 40), BatchRef)
    assert numbers(run.files.store, found) == [n**2 for n in range(40)]
    assert sorted(pool.made) == list(range(40))  # none twice


def test_what_has_served_is_removed_with_its_markers(run: Any) -> None:
    store = run.files.store
    todo = parts(run, Pool(store), 2)
    write_batch(store, todo[0].out_key, {"number": [7]})  # of another attempt: its key is taken
    found = spread(run, 1, "squares", todo, BatchRef)
    assert found[0].objects != {todo[0].out_key}
    discard(run, todo, found)
    assert [run.files.finished(part.out_key) for part in todo] == [None, None]
    again = spread(run, 1, "squares", todo, BatchRef)
    assert numbers(store, again) == [0, 1]


def test_slices_are_even_and_bounded() -> None:
    assert slices(5, 2, 10) == [(0, 1), (1, 3), (3, 5)]
    assert slices(256, 256, 64) == [(0, 256)]
    assert slices(0, 256, 64) == [(0, 0)]
    many = slices(1_000_000, 256, 64)
    assert len(many) == 64
    assert (many[0][0], many[-1][1]) == (0, 1_000_000)
