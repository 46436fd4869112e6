"""A worker's seconds are shared among the calls that hold it, and never counted twice."""

from __future__ import annotations

import pytest

from engines.workers.devices import DeviceTime, HeldSeconds


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_calls_at_once_share_a_worker() -> None:
    clock = Clock()
    time, first, second = DeviceTime(clock), HeldSeconds(), HeldSeconds()
    with time.held("rollout", ["rollout-0"], first):
        clock.now = 4.0
        with time.held("rollout", ["rollout-0"], second):
            clock.now = 6.0
    clock.now = 9.0  # idle
    with time.held("rollout", ["rollout-0"], second):
        clock.now = 10.0
    assert first.seconds == {"rollout": 5.0}
    assert second.seconds == {"rollout": 2.0}


def test_a_call_of_a_gang_has_every_worker_of_its_pools() -> None:
    clock = Clock()
    time, sync, sampled = DeviceTime(clock), HeldSeconds(), HeldSeconds()
    with (
        time.held("rollout", ["rollout-1"], sampled),
        time.held("train", ["train-0", "train-1"], sync),
        time.held("rollout", ["rollout-0", "rollout-1"], sync),
    ):
        clock.now = 2.0
    assert sync.seconds == {"train": 4.0, "rollout": 3.0}
    assert sampled.seconds == {"rollout": 1.0}


def test_a_call_that_fails_has_held_its_worker() -> None:
    clock = Clock()
    time, holder = DeviceTime(clock), HeldSeconds()

    def fails() -> None:
        clock.now = 3.0
        raise RuntimeError("the worker died")

    with pytest.raises(RuntimeError), time.held("cpu", ["cpu-0"], holder):
        fails()
    clock.now = 5.0
    with time.held("cpu", ["cpu-0"], HeldSeconds()):
        clock.now = 6.0
    assert holder.seconds == {"cpu": 3.0}
