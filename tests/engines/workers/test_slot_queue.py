"""Calls with a turn go to whichever worker is free first, those of the lowest turn first."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Mapping

import pytest

from engines.failures import CallCancelled
from engines.workers.cluster import raise_if_set
from engines.workers.pool import SlotQueue


class Pool:
    """A queue for workers without processes."""

    def __init__(self) -> None:
        self.cancel = threading.Event()
        self.workers = {"pair-0": "a", "pair-1": "b"}
        self.known = True  # whether the table of workers is up to date
        self.looks = 0
        self.queue = SlotQueue(
            1,
            self.look,
            lambda: dict(self.workers) if self.known else None,
            lambda: raise_if_set(self.cancel),
        )

    def look(self) -> dict[str, str]:
        self.looks += 1
        self.known = True
        return dict(self.workers)


class Call:
    """A call under way in a thread of its own."""

    def __init__(self, pool: Pool, turn: tuple[int, ...]) -> None:
        self.worker: str | None = None
        self.failure: Exception | None = None
        self.given_up = False
        self.began, self.end = threading.Event(), threading.Event()

        def run() -> None:
            try:
                self.worker = pool.queue.take(turn, lambda: self.given_up)
            except CallCancelled as error:
                self.failure = error
                return
            if self.worker is None:
                return
            self.began.set()
            self.end.wait(30)
            pool.queue.free(self.worker)

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
    before = len(pool.queue.waiting)
    calls = [Call(pool, turn) for turn in turns]
    while len(pool.queue.waiting) < before + len(turns):
        threading.Event().wait(0.01)
    yield calls
    for one in calls:
        one.finish()


def busy(pool: Pool) -> list[Call]:
    """A call on each worker."""
    calls = [Call(pool, (1, number)) for number in range(len(pool.workers))]
    assert all(one.began.wait(10) for one in calls)
    return calls


def test_work_goes_to_the_worker_that_is_done_first(pool: Pool) -> None:
    slow, quick = busy(pool)
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
    assert pool.queue.waiting == []
    assert not any(pool.queue.calls.values())


def test_the_end_of_the_run_ends_the_wait(pool: Pool) -> None:
    calls = busy(pool)
    with waiting(pool, (1, 3), (1, 4)) as waiters:
        pool.cancel.set()
        for one in waiters:
            one.thread.join(10)
            assert isinstance(one.failure, CallCancelled)
    for one in calls:
        one.finish()
    assert pool.queue.waiting == []
    assert not any(pool.queue.calls.values())


def test_what_is_given_up_leaves_the_queue_though_no_slot_is_free(pool: Pool) -> None:
    calls = busy(pool)
    with waiting(pool, (1, 3), (1, 4)) as (first, second):
        first.given_up = True
        pool.queue.wake()
        first.thread.join(10)
        assert (first.worker, first.thread.is_alive()) == (None, False)
        calls[0].finish()
        assert second.began.wait(10)
    calls[1].finish()
    assert not any(pool.queue.calls.values())


def test_a_worker_that_left_gets_nothing_and_one_that_joined_is_found(pool: Pool) -> None:
    calls = busy(pool)
    gone = calls[0].worker
    assert gone is not None
    with waiting(pool, (1, 3)) as (waiter,):
        del pool.workers[gone]
        pool.known = False  # as the scheduler's word of it makes the table old
        calls[0].finish()
        assert not waiter.began.wait(0.3)
        pool.workers["pair-2"] = "c"
        assert waiter.began.wait(10)
        assert waiter.worker == "pair-2"
    calls[1].finish()


def test_a_long_queue_looks_at_the_workers_once_at_a_time(pool: Pool) -> None:
    calls = busy(pool)
    with waiting(pool, *[(2, number) for number in range(40)]) as waiters:
        before = pool.looks
        for one in waiters:
            one.end.set()  # each ends as soon as it begins
        for one in calls:
            one.finish()
        for one in waiters:
            one.thread.join(10)
        assert all(one.worker is not None for one in waiters)
    # Whoever ended handed its slot on; only the first in the queue may have looked meanwhile.
    assert pool.looks - before <= len(waiters) + 2
    assert not any(pool.queue.calls.values())


def test_a_call_gets_the_worker_that_it_would_rather_have_where_that_is_free(pool: Pool) -> None:
    def go_on() -> bool:
        return False

    assert pool.queue.take((1,), go_on, "pair-1") == "pair-1"
    assert pool.queue.take((2,), go_on, "pair-1") == "pair-0", "another is not waited for less"
    for name in pool.workers:
        pool.queue.free(name)
    assert pool.queue.take((3,), go_on, "gone") == "pair-0"
    assert pool.queue.least_busy("pair-0") == "pair-0", "busy, and it has what the call needs"
    assert pool.queue.least_busy("gone") == "pair-1"


class Counted(Mapping[str, str]):
    """Workers that count how many of them were looked through."""

    def __init__(self, count: int) -> None:
        self.names = [f"rollout-{number}" for number in range(count)]
        self.visits = 0

    def __getitem__(self, name: str) -> str:
        return name

    def __contains__(self, name: object) -> bool:
        return name != ""  # the worker that a call would rather have, where it has no wish

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        for name in self.names:
            self.visits += 1
            yield name


def test_a_call_does_not_look_through_all_workers() -> None:
    workers = Counted(1024)
    queue = SlotQueue(2, lambda: workers, lambda: workers, lambda: None)
    dice, held = random.Random(0), list[str]()
    for number in range(8192):
        if held and (len(held) == 2048 or dice.random() < 0.4):
            queue.free(held.pop(dice.randrange(len(held))))
        else:
            fewest = min(queue.calls[name] for name in workers.names)
            name = queue.take((number,), lambda: False)
            assert name is not None
            assert queue.calls[name] == fewest + 1
            assert not any(queue.calls[one] == fewest and one < name for one in workers.names)
            held.append(name)
    assert workers.visits <= 4 * len(workers), "once when they were new, and seldom after that"
