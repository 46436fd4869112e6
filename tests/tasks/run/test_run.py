"""What a run remembers of the steps behind it: a bounded number of them, however many there were."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from engines.workers.devices import DeviceTime
from tasks import train
from tasks.results import Carried, LeftOver
from tasks.run import clock as clocks
from tasks.run.attempts import AttemptLog
from tasks.run.clock import Clock
from tasks.run.events import Listeners
from tasks.run.roles import ROLLOUT
from tasks.run.run import Run
from tasks.run.stage import attempted

STEPS, AT_ONCE, SHARDS = 400, 3, 8


class FakeEngines(dict[object, Any]):
    """Rollout engines that note what they are told, and no trainer."""

    def __init__(self) -> None:
        self.trained: list[object] = []
        self.told: list[tuple[int, ...]] = []
        self[ROLLOUT] = SimpleNamespace(committed=lambda *words: self.told.append(words))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run with max_staleness 2, as far as its own memory goes."""
    monkeypatch.setattr("tasks.run.attempts.get_run_logger", lambda: logging.getLogger("run"))
    after = SimpleNamespace(cursor="cursor", carried=Carried())
    monkeypatch.setattr(clocks, "Position", SimpleNamespace(after=lambda record: after))
    made = object.__new__(Run)
    made.name = "run"
    made.attempts, made.device_time = AttemptLog(), DeviceTime()
    clock: Any = object.__new__(Clock)
    made.clock = clock
    clock.drawn, clock.carried, clock.left_over = {}, {}, {}
    clock._config = SimpleNamespace(max_staleness=AT_ONCE - 1, reserved_versions=0)
    clock._start, clock._times, clock._began = 0, threading.Lock(), {}
    clock.rows = SimpleNamespace(has_drawn=lambda *words: None, committed=lambda *words: None)
    clock.gate = SimpleNamespace(committed=lambda step: None, drawn=lambda step: None)
    for name, fake in {
        "listeners": Listeners(),
        "history": SimpleNamespace(add=lambda record: None),
        "shards": SimpleNamespace(committed=lambda step: None),
        "engines": FakeEngines(),
    }.items():
        setattr(made, name, fake)
    return made


def test_a_long_run_remembers_the_steps_under_way_only(run: Any) -> None:
    begun = 0
    for head in range(1, STEPS):
        for step in range(begun + 1, head + AT_ONCE):
            for shard in range(SHARDS):
                with attempted(run, step, "rollout", shard):
                    pass
            run.clock.leave(step, "cursor", LeftOver())
            begun = step
        for step in range(head, head + AT_ONCE):
            with attempted(run, step, "update"):
                pass
        assert len(run.attempts.of(head)) >= 1
        run.advance(SimpleNamespace(step=head))
        with attempted(run, head, "evaluate"):  # after its commit: goes with the next one
            pass
        assert run.attempts.of(head + 1)
        assert len(run.attempts) <= AT_ONCE + 2
        for kept in (run.clock.drawn, run.clock.carried, run.clock.left_over):
            assert len(kept) <= AT_ONCE + 2
    assert run.engines.told[-1] == (STEPS - 1, STEPS - AT_ONCE)  # and the oldest version of use
    assert run.engines.told[0] == (1, 0)


def test_what_changed_while_nobody_ran_is_marked_at_the_next_step_alone(run: Any) -> None:
    run.marks = {"meaning_changed/math": 3.0}
    run.clock.begin(1)
    run.clock.leave(1, "cursor", LeftOver())
    run.advance(SimpleNamespace(step=1))
    assert run.marks == {}


def test_steps_that_overlap_raise_the_failure_of_the_first(run: Any) -> None:
    failed, given_up = [], threading.Event()

    def make(step: int) -> None:
        if step == 5:
            raise OSError("step 5 failed")

    here = SimpleNamespace(
        config=SimpleNamespace(max_staleness=AT_ONCE - 1),
        gate=SimpleNamespace(fail=failed.append, give_up=given_up.set),
        clock=SimpleNamespace(steps_left=lambda: iter(range(1, 60))),
    )
    with pytest.raises(OSError, match="step 5 failed"):
        train._overlapping(make, here)  # type: ignore[arg-type]
    assert failed == [5] and given_up.is_set()


def test_a_step_lasts_from_the_commit_before_it(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(clocks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = run.clock
    clock._committed = 0.0
    clock.begin(1)
    now[0] = 12.0
    clock.begin(2)
    now[0] = 15.0
    assert clock.seconds(1) == 5
    clock.advance(SimpleNamespace(step=1))
    now[0] = 19.0
    assert clock.seconds(2) == 4
