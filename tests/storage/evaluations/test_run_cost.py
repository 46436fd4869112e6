"""A run's cost in all: steps, what followed them, evaluations since; nothing twice."""

from __future__ import annotations

import pytest

from storage.evaluations.run_cost import DeviceCost, RunCost, cost_of_run
from storage.objects.store import Store
from storage.runs.live import End, write_end
from storage.runs.run_store import RunStore
from tests.storage.audit import small_run
from tests.storage.evaluations.stored import stored_evaluation

HOURS, MONEY = "cost/so_far/device_hours", "cost/so_far/money"


@pytest.fixture
def run(store: Store) -> RunStore:
    run = RunStore(store, "a")
    run.write_run({"config": {}, "code": "0.1.0", "flow": "flows.grpo:grpo"})
    before = small_run.take(run, 1, metrics={HOURS: 1.0, MONEY: 2.0})
    small_run.take(run, 2, before, metrics={HOURS: 3.0, MONEY: 6.0})
    return run


def evaluated(run: RunStore, name: str, hours: float, asked_by: str, back_fill: bool) -> None:
    cost = {"device_hours": hours, "money": 2 * hours}
    stored_evaluation(run, name, asked_by=asked_by, back_fill=back_fill, cost=cost)


def test_the_parts_of_a_runs_cost(run: RunStore) -> None:
    steps, nothing = (
        DeviceCost(device_hours=3.0, money=6.0),
        DeviceCost(device_hours=0.0, money=0.0),
    )
    none = DeviceCost(device_hours=0.0, money=None)
    assert cost_of_run(run) == RunCost(steps=steps, after=nothing, back_fills=none)
    write_end(run, End(step=2, cost={HOURS: 3.5, MONEY: 7.0}))
    evaluated(run, "of-the-run", 0.25, "a", back_fill=False)  # in a commit, or in the end
    evaluated(run, "of-another", 0.25, "b", back_fill=True)  # found by this run, paid by that one
    evaluated(run, "since", 0.125, "a", back_fill=True)
    cost = cost_of_run(run)
    assert cost == RunCost(
        steps=steps,
        after=DeviceCost(device_hours=0.5, money=1.0),
        back_fills=DeviceCost(device_hours=0.125, money=0.25),
    )
    assert (cost.device_hours, cost.money) == (3.625, 7.25)


def test_an_end_of_before_the_last_step_says_nothing(run: RunStore) -> None:
    write_end(run, End(step=1, cost={HOURS: 1.5}))  # then the run went on, and counted it on
    cost = cost_of_run(run)
    assert cost is not None and cost.after.device_hours == 0.0


def test_a_run_without_costs_has_none(store: Store) -> None:
    run = RunStore(store, "old")
    run.write_run({"config": {}, "code": "0.1.0", "flow": "flows.grpo:grpo"})
    assert cost_of_run(run) is None
    small_run.take(run, 1, metrics={"reward/mean": 1.0})
    assert cost_of_run(run) is None
