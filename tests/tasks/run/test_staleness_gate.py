"""Steps under way together keep the bound on staleness, and their order, whatever the timing."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.failures import CallCancelled
from tasks.run.clock import Gate, StepGivenUp, WaitTooLong


class Schedule:
    """Steps that take random times, as tasks/train.py makes them."""

    def __init__(self, gate: Gate, steps: int, seed: int, fails: int = 0) -> None:
        self.gate, self.steps, self.fails = gate, steps, fails
        self.random = random.Random(seed)
        self.sampled_with: dict[int, int] = {}
        self.trained: list[int] = []
        self.given_up: list[int] = []
        self.under_way = self.most = 0
        self.lock = threading.Lock()

    def pause(self) -> None:
        time.sleep(self.random.choice([0, 0, 0.001, 0.003]))

    def step(self, step: int) -> None:
        with self.lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        try:
            self.pause()
            self.gate.drawn(step)
            self.sampled_with[step] = self.gate.head
            self.pause()
            if step == self.fails:
                raise RuntimeError("the reward broke")
            self.gate.wait_to_train(step)
            self.gate.check_turn(step)
            self.trained.append(step)
            self.pause()
            with self.lock:
                self.under_way -= 1
            self.gate.committed(step)
        except StepGivenUp:
            self.given_up.append(step)
        except RuntimeError:
            self.gate.fail(step)
            raise

    def run(self) -> list[Future[None]]:
        made = []
        with ThreadPoolExecutor(self.gate.max_staleness + 1) as threads:
            for step in range(self.gate.head + 1, self.steps + 1):
                try:
                    self.gate.wait_to_begin(step)
                except StepGivenUp:
                    break
                made.append(threads.submit(self.step, step))
        return made


@settings(max_examples=40, deadline=None)
@given(staleness=st.integers(0, 4), begin=st.integers(0, 3), seed=st.integers(0, 2**31))
def test_no_sample_is_staler_than_the_bound(staleness: int, begin: int, seed: int) -> None:
    schedule = Schedule(Gate(begin, staleness, deadline=30), steps=begin + 8, seed=seed)
    for made in schedule.run():
        made.result()
    assert schedule.trained == list(range(begin + 1, begin + 9))
    lags = [step - 1 - version for step, version in schedule.sampled_with.items()]
    assert max(lags) <= staleness
    assert schedule.most <= staleness + 1


@settings(max_examples=25, deadline=None)
@given(staleness=st.integers(1, 4), fails=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_a_failure_gives_up_what_comes_after_it_only(staleness: int, fails: int, seed: int) -> None:
    schedule = Schedule(Gate(0, staleness, deadline=30), steps=8, seed=seed, fails=fails)
    made = schedule.run()
    assert schedule.trained == list(range(1, fails))
    assert [future.exception() is not None for future in made].count(True) == 1
    assert all(step > fails for step in schedule.given_up)


def test_steps_do_overlap() -> None:
    gate = Gate(0, 2, deadline=30)
    for step in (1, 2, 3):
        gate.wait_to_begin(step)
        gate.drawn(step)
    waits = threading.Thread(target=gate.wait_to_begin, args=(4,))
    waits.start()
    waits.join(0.1)
    assert waits.is_alive(), "version 1 is not there yet"
    gate.committed(1)
    waits.join(10)
    assert not waits.is_alive()


def test_a_lower_bound_holds_for_steps_that_have_not_begun() -> None:
    """Of a step that waits already, too; those under way train and are committed."""
    gate = Gate(0, 2, deadline=30)
    for step in (1, 2, 3):
        gate.wait_to_begin(step)
        gate.drawn(step)
    waits = threading.Thread(target=gate.wait_to_begin, args=(4,))
    waits.start()
    gate.lower(0)
    for step in (1, 2, 3):
        gate.wait_to_train(step)
        waits.join(0.1)
        assert waits.is_alive(), "until the step before it is committed"
        gate.committed(step)
    waits.join(10)
    assert not waits.is_alive()
    gate.lower(1)
    assert gate.max_staleness == 0, "a bound is never raised"


def test_after_the_step_that_ends_a_run_none_is_made() -> None:
    """Neither by a step that waits, nor by one that might go on when it is committed."""
    gate = Gate(0, 1, deadline=30)
    for step in (1, 2):
        gate.wait_to_begin(step)
        gate.drawn(step)
    gate.end_after(1, RuntimeError("too far off"))
    gate.committed(1)
    for wait, step in ((gate.wait_to_train, 2), (gate.wait_to_begin, 3)):
        with pytest.raises(StepGivenUp, match="since the run ends after step 1"):
            wait(step)
    gate.wait_to_train(1)
    gate.check_end(2)
    with pytest.raises(RuntimeError, match="too far off"):
        gate.check_end(1)


def test_prompts_are_drawn_in_order() -> None:
    gate = Gate(0, 2, deadline=0.2)
    gate.wait_to_begin(1)
    with pytest.raises(WaitTooLong, match="for step 1 to draw its prompts"):
        gate.wait_to_begin(2)


def test_a_wait_that_takes_too_long_says_for_what() -> None:
    gate = Gate(4, 1, deadline=0.2)
    gate.drawn(5)
    gate.drawn(6)
    with pytest.raises(WaitTooLong, match=r"Step 6 waited \d+ s for step 5 to be committed"):
        gate.wait_to_train(6)
    with pytest.raises(WaitTooLong, match="Step 7 waited .* for policy version 5"):
        gate.wait_to_begin(7)


def test_the_end_of_the_run_ends_a_wait() -> None:
    gate = Gate(0, 1, deadline=30)
    gate.cancelled.set()
    with pytest.raises(CallCancelled, match="step 1 to be committed"):
        gate.wait_to_train(2)


def test_a_flow_that_does_not_wait_is_told() -> None:
    with pytest.raises(ValueError, match=r"run\.gate\.wait_to_train\(step\)"):
        Gate(0, 1, deadline=30).check_turn(2)


def test_what_a_person_ended_is_not_given_up() -> None:
    gate = Gate(0, 1, deadline=30)
    gate.cancelled.set()
    gate.give_up()
    assert not gate.given_up
    other = Gate(0, 1, deadline=30)
    other.give_up()
    assert other.given_up and other.cancelled.is_set()
