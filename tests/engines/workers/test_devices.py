"""Who has the devices of a pool: one role at a time, in an order that can be seen."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engines.failures import CallCancelled, GangLost
from engines.workers.devices import DeviceTurns
from engines.workers.engine import Moved


class Engines:
    """Engines of a role that note what is done to them."""

    pool = "gpu"

    def __init__(self, role: str, log: list[str]) -> None:
        self.role, self.log = role, log
        self.fails: dict[str, Exception] = {}

    def sleep(self, cancel: threading.Event | None = None) -> Moved:
        return self._move("sleeps")

    def wake(self, cancel: threading.Event | None = None) -> Moved:
        return self._move("wakes")

    def _move(self, what: str) -> Moved:
        if (error := self.fails.pop(what, None)) is not None:
            raise error
        self.log.append(f"{self.role} {what}")
        return Moved(nbytes=10, seconds=0.5)


@pytest.fixture
def log() -> list[str]:
    return []


def test_a_role_wakes_once_the_one_before_it_sleeps(log: list[str]) -> None:
    turns, actor, rollout = DeviceTurns(True), Engines("actor", log), Engines("rollout", log)
    for holder in (rollout, rollout, actor, actor, rollout):
        with turns.held(holder):
            assert turns.holder("gpu") == holder.role
            log.append(f"{holder.role} works")
    assert log == [
        *("rollout wakes", "rollout works", "rollout works", "rollout sleeps"),
        *("actor wakes", "actor works", "actor works", "actor sleeps"),
        *("rollout wakes", "rollout works"),
    ]
    metrics = turns.metrics()
    assert metrics["bytes/wake/rollout"] == 20.0
    assert metrics["time/sleep/actor"] == 0.5
    assert turns.metrics() == {}


def test_a_role_waits_for_all_calls_of_another_and_they_do_not_wait_for_each_other(
    log: list[str],
) -> None:
    turns, actor, rollout = DeviceTurns(True), Engines("actor", log), Engines("rollout", log)
    both, go_on = threading.Barrier(3), threading.Event()

    def shard() -> None:
        with turns.held(rollout):
            both.wait(10)
            go_on.wait(10)
            log.append("shard done")

    def update() -> None:
        with turns.held(actor):
            log.append("update")

    with ThreadPoolExecutor(3) as threads:
        shards = [threads.submit(shard) for _ in range(2)]
        both.wait(10)  # both are in
        trained = threads.submit(update)
        assert turns.holder("gpu") == "rollout"
        go_on.set()
        for one in (*shards, trained):
            one.result(10)
    assert log == ["rollout wakes", *["shard done"] * 2, "rollout sleeps", "actor wakes", "update"]


def test_who_fails_while_it_wakes_has_no_turn_and_can_try_again(log: list[str]) -> None:
    turns, actor, rollout = DeviceTurns(True), Engines("actor", log), Engines("rollout", log)
    with turns.held(rollout):
        pass
    actor.fails["wakes"] = GangLost(0, "train-0", "killed")
    with pytest.raises(GangLost), turns.held(actor):
        raise AssertionError("it has no turn")
    assert turns.holder("gpu") is None
    with turns.held(actor):
        log.append("update")
    assert log == ["rollout wakes", "rollout sleeps", "actor wakes", "update"]


def test_who_fails_while_it_goes_to_sleep_is_asked_again(log: list[str]) -> None:
    turns, actor, rollout = DeviceTurns(True), Engines("actor", log), Engines("rollout", log)
    with turns.held(rollout):
        pass
    rollout.fails["sleeps"] = CallCancelled("stopped")
    with pytest.raises(CallCancelled), turns.held(actor):
        raise AssertionError("the devices are not free")
    with turns.held(actor):
        pass
    assert log == ["rollout wakes", "rollout sleeps", "actor wakes"]


def test_a_wait_ends_when_the_run_is_cancelled(log: list[str]) -> None:
    turns, actor, rollout = DeviceTurns(True), Engines("actor", log), Engines("rollout", log)
    cancel = threading.Event()
    cancel.set()
    with turns.held(rollout), pytest.raises(CallCancelled), turns.held(actor, cancel):
        raise AssertionError("rollout has them")


def test_without_sharing_nobody_waits_or_sleeps(log: list[str]) -> None:
    turns, actor, rollout = DeviceTurns(False), Engines("actor", log), Engines("rollout", log)
    with turns.held(rollout), turns.held(actor):
        pass
    assert log == []
