"""Units on lease: to whoever is idle, to another when a worker is slow, dead or gone."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

import pytest

from engines.elastic.leases import MOST_FAILURES, Unit, UnitLeases
from engines.failures import CallCancelled, WorkerLost
from storage.objects.errors import ObjectMissing

DEADLINE = 20.0


class Workers:
    """Workers that a test holds up, lets fail, and has join and leave."""

    def __init__(self, *names: str) -> None:
        self.there = {name: f"tcp://{name}" for name in names}
        self.did: list[tuple[str, int]] = []  # in the order in which they began
        self.held: dict[tuple[str, int], threading.Event] = {}
        self.fails: dict[tuple[str, int], list[Exception]] = {}
        self.now = 0.0
        self.stop = False

    def work(self, unit: int, name: str, address: str) -> str:
        assert address == f"tcp://{name}"
        self.did.append((name, unit))
        if errors := self.fails.get((name, unit)) or self.fails.get(("*", unit)):
            raise errors.pop(0)
        if (name, unit) in self.held:
            assert self.held[name, unit].wait(DEADLINE)
        else:
            time.sleep(0.01)
        return f"{unit} by {name}"

    def check(self) -> None:
        if self.stop:
            raise CallCancelled("stopped")

    def leases(self, lease: float = 5.0) -> UnitLeases:
        return UnitLeases(lambda: dict(self.there), self.check, lease, clock=lambda: self.now)

    def units(self, *numbers: int) -> list[Unit[str]]:
        return [functools.partial(self.work, number) for number in numbers]

    def hold(self, name: str, unit: int) -> threading.Event:
        self.held[name, unit] = threading.Event()
        return self.held[name, unit]


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def in_thread(run: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_results_come_in_the_order_of_the_units_and_each_is_done_once() -> None:
    workers = Workers("a", "b", "c")
    done, went = workers.leases().done(workers.units(10, 11, 12, 13, 14, 15, 16))
    assert [one.split()[0] for one in done] == ["10", "11", "12", "13", "14", "15", "16"]
    assert sorted(unit for _, unit in workers.did) == [10, 11, 12, 13, 14, 15, 16]
    assert {name for name, _ in workers.did} == {"a", "b", "c"}
    assert went.taken_over == 0
    assert not went.failures


def test_a_slow_workers_unit_is_taken_over_after_its_lease_and_not_before() -> None:
    workers = Workers("slow", "other")
    let_go = workers.hold("slow", 0)
    leases, found = workers.leases(lease=5.0), []
    thread = in_thread(lambda: found.append(leases.done(workers.units(0, 1, 2))))
    until(lambda: ("other", 2) in workers.did)
    workers.now = 4.9
    time.sleep(0.5)  # two looks
    assert ("other", 0) not in workers.did
    workers.now = 5.0
    thread.join(DEADLINE)
    ((done, went),) = found
    assert done == ["0 by other", "1 by other", "2 by other"]
    assert went.taken_over == 1
    # The slow one is still at it: in the next round it gets nothing until it is done.
    assert leases.done(workers.units(7))[0] == ["7 by other"]
    let_go.set()
    until(lambda: not leases._busy)
    workers.there.pop("other")
    assert leases.done(workers.units(8))[0] == ["8 by slow"]


def test_a_slow_worker_that_ends_first_after_all_is_the_one_that_counts() -> None:
    workers = Workers("slow", "other")
    first, second = workers.hold("slow", 0), workers.hold("other", 0)
    leases, found = workers.leases(lease=5.0), []
    thread = in_thread(lambda: found.append(leases.done(workers.units(0))))
    until(lambda: ("slow", 0) in workers.did or ("other", 0) in workers.did)
    workers.now = 6.0
    until(lambda: len(workers.did) == 2)
    first.set()
    thread.join(DEADLINE)
    second.set()
    assert found[0][0] == ["0 by slow"]


def test_a_lost_workers_unit_goes_to_another_and_the_cause_is_counted() -> None:
    workers = Workers("a", "b")
    workers.fails["*", 1] = [WorkerLost("a", "killed"), WorkerLost("b", "killed")]
    done, went = workers.leases().done(workers.units(0, 1, 2))
    assert [one.split()[0] for one in done] == ["0", "1", "2"]
    assert went.failures == {1: 2}
    second = sorted((one.number, one.error) for one in went.tries if one.unit == 2)
    assert [number for number, _ in second] == [1, 2, 3]
    assert [error.partition(":")[0] for _, error in second] == ["WorkerLost", "WorkerLost", ""]


def test_a_unit_that_keeps_failing_raises_its_last_error() -> None:
    workers = Workers("a")
    workers.fails["*", 1] = [WorkerLost("a", f"number {n}") for n in range(MOST_FAILURES)]
    with pytest.raises(WorkerLost, match=f"number {MOST_FAILURES - 1}"):
        workers.leases().done(workers.units(0, 1))
    assert [unit for _, unit in workers.did].count(1) == MOST_FAILURES


def test_what_is_no_failure_of_the_machinery_is_raised_at_once() -> None:
    workers = Workers("a", "b")
    workers.fails["*", 0] = [ObjectMissing("the weights are gone")]
    with pytest.raises(ObjectMissing, match="the weights are gone"):
        workers.leases().done(workers.units(0, 1))
    assert [unit for _, unit in workers.did].count(0) == 1


def test_a_worker_that_joins_gets_the_next_unit_and_one_that_leaves_none() -> None:
    workers = Workers("first")
    let_go = workers.hold("first", 1)
    leases, found = workers.leases(), []
    thread = in_thread(lambda: found.append(leases.done(workers.units(1, 2, 3))))
    until(lambda: ("first", 1) in workers.did)
    workers.there = {"late": "tcp://late"}  # the first takes no new calls
    until(lambda: ("late", 3) in workers.did)
    let_go.set()
    thread.join(DEADLINE)
    assert found[0][0] == ["1 by first", "2 by late", "3 by late"]


def test_a_cancelled_run_ends_the_wait() -> None:
    workers = Workers("a")
    let_go = workers.hold("a", 0)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            workers.leases().done(workers.units(0))
        except CallCancelled as error:
            errors.append(error)

    thread = in_thread(run)
    until(lambda: ("a", 0) in workers.did)
    workers.stop = True
    thread.join(DEADLINE)
    let_go.set()
    assert len(errors) == 1
