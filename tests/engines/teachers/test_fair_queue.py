"""Whose turn it is, and how much each run may have."""

from __future__ import annotations

import pytest

from engines.teachers.fair_queue import FairQueue


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def taken(queue: FairQueue[str], count: int) -> str:
    return "".join(queue.take() or "-" for _ in range(count))


def test_a_run_with_a_thousand_calls_does_not_starve_one_with_four() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(1000):
        queue.put("large", 10, "l")
    assert taken(queue, 3) == "lll"
    for _ in range(4):
        queue.put("small", 10, "s")
    found = taken(queue, 10)
    assert (found.count("s"), found[8:]) == (4, "ll")
    assert queue.waiting("large") == (991, 9910)


def test_large_calls_have_their_turn_less_often_than_small_ones() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(90):
        queue.put("small", 10, "s")
    for _ in range(30):
        queue.put("large", 30, "l")
    assert taken(queue, 40).count("l") == 10
    assert taken(queue, 40).count("l") == 10


def test_calls_of_a_run_keep_their_order_and_one_that_was_idle_has_saved_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in "abcdef":
        queue.put("first", 10, name)
    assert taken(queue, 4) == "abcd"
    for name in "123":
        queue.put("second", 10, name)
    assert taken(queue, 5) in ("1e2f3", "e1f23")
    assert taken(queue, 1) == "-"


def test_a_run_beyond_its_quota_waits_and_others_do_not() -> None:
    clock = Clock()
    queue: FairQueue[str] = FairQueue(60, clock)
    for _ in range(4):
        queue.put("greedy", 40, "g")
    assert taken(queue, 3) == "gg-"  # the second took 20 more than there were
    assert queue.pause() == pytest.approx(20.0)
    queue.put("other", 10, "o")
    assert queue.pause() == 0.0
    assert taken(queue, 2) == "o-"
    clock.now = 20.5
    assert taken(queue, 2) == "g-"
    clock.now = 3600.0  # a pause earns a minute's quota, not an hour's
    queue.put("greedy", 40, "g")
    queue.put("greedy", 40, "g")
    assert taken(queue, 3) == "gg-"


def test_a_call_larger_than_the_quota_has_its_turn() -> None:
    clock = Clock()
    queue: FairQueue[str] = FairQueue(10, clock)
    queue.put("run", 1000, "a")
    queue.put("run", 1, "b")
    assert taken(queue, 2) == "a-"
    assert queue.pause() == pytest.approx(990 * 6)
    clock.now = 990 * 6 + 1.0
    assert taken(queue, 1) == "b"


def test_a_run_that_is_dropped_leaves_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.put("one", 10, "a")
    queue.put("other", 10, "b")
    assert queue.drop("one") == ["a"]
    assert queue.drop("nobody") == []
    assert (taken(queue, 2), queue.pause(), queue.waiting("one")) == ("b-", None, (0, 0))
