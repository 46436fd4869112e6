"""Calls with a turn go to whichever worker is free first, those of the lowest turn first."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engines.failures import CallCancelled
from engines.workers.pool import EnginePool

SLOTS = 1


class Pool(EnginePool):
    """Two workers without processes, whose engines always stand."""

    def __init__(self) -> None:
        config = SimpleNamespace(pools={"pair": SimpleNamespace(slots=SLOTS)})
        cluster = cast("Any", SimpleNamespace(config=config))
        spec = cast("Any", None)
        cancel = threading.Event()
        super().__init__(
            cluster, "pair", "role", spec, deadline=30.0, start_timeout=30.0, cancel=cancel
        )

    def live(self) -> dict[str, str]:
        return {"pair-0": "a", "pair-1": "b"}

    def ready(self, name: str, address: str) -> None:
        pass


class Call:
    """A call under way in a thread of its own."""

    def __init__(self, pool: Pool, turn: tuple[int, ...]) -> None:
        self.worker = ""
        self.failure: Exception | None = None
        self.began, self.end = threading.Event(), threading.Event()

        def run() -> None:
            try:
                with pool.picked(turn=turn) as (name, _):
                    self.worker = name
                    self.began.set()
                    self.end.wait(30)
            except CallCancelled as error:
                self.failure = error

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def finish(self) -> None:
        self.end.set()
        self.thread.join(30)


@pytest.fixture
def pool() -> Pool:
    return Pool()


@contextlib.contextmanager
def waiting(pool: Pool, *turns: tuple[int, ...]) -> Iterator[list[Call]]:
    """Calls that wait for a slot, in the queue before the body begins."""
    before = len(pool._waiting)
    calls = [Call(pool, turn) for turn in turns]
    while len(pool._waiting) < before + len(turns):
        threading.Event().wait(0.01)
    yield calls
    for one in calls:
        one.finish()


def test_work_goes_to_the_worker_that_is_done_first(pool: Pool) -> None:
    slow, quick = Call(pool, (1, 1)), Call(pool, (1, 2))
    assert slow.began.wait(10) and quick.began.wait(10)
    with waiting(pool, (2, 1), (1, 3)) as (later, sooner):
        assert not later.began.is_set() and not sooner.began.is_set()
        quick.finish()
        assert sooner.began.wait(10), "the older step is first, though it came second"
        assert sooner.worker == quick.worker != slow.worker
        assert not later.began.is_set()
        sooner.finish()
        assert later.began.wait(10)
        assert later.worker == quick.worker
    slow.finish()
    assert pool._waiting == []
    assert not any(pool._calls.values())


def test_the_end_of_the_run_ends_the_wait(pool: Pool) -> None:
    busy = [Call(pool, (1, number)) for number in range(2)]
    assert all(one.began.wait(10) for one in busy)
    with waiting(pool, (1, 3), (1, 4)) as calls:
        assert pool.cancel is not None
        pool.cancel.set()
        for one in calls:
            one.thread.join(10)
            assert isinstance(one.failure, CallCancelled)
    for one in busy:
        one.finish()
    assert pool._waiting == []
