"""What a step cost, by hand; docs/cost.md names every metric."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from storage.tracking.cost import (
    AttemptCost,
    Pool,
    Used,
    Window,
    calls_cost,
    counted,
    step_cost,
    window_of,
)

POOLS = {
    "train": Pool(workers=2, gpus=4, price_per_hour=3.6),
    "cpu": Pool(workers=1, price_per_hour=0.36),
}
CALLS = [
    AttemptCost(stage="prompts", started=110.0, failed=False, worker_seconds={"cpu": 1.0}),
    AttemptCost(stage="update", started=112.0, failed=True, worker_seconds={"train": 2.0}),
    AttemptCost(stage="update", started=114.0, failed=False, worker_seconds={"train": 4.0}),
]


def test_what_a_pool_held_is_work_lost_starting_and_idle() -> None:
    made = step_cost(
        CALLS,
        Window(begin=100.0, end=120.0, launched=True),
        POOLS,
        {"train": Used(cpu_seconds=7.0, joules=500.0, busy=0.75), "cpu": Used(cpu_seconds=1.0)},
        {"cost/so_far/device_hours": 1.0, "cost/so_far/money": None},
        samples=10,
    )
    seconds = {
        name.removeprefix("cost/device_seconds/"): value
        for name, value in made.items()
        if name.startswith("cost/device_seconds/")
    }
    assert seconds == pytest.approx(
        {
            "train/held": 160.0,  # 2 workers, 4 GPUs each, 20 s
            "train/starting": 80.0,  # until the first call
            "train/update": 16.0,
            "train/lost": 8.0,
            "train/idle": 56.0,
            "cpu/held": 20.0,
            "cpu/starting": 10.0,
            "cpu/prompts": 1.0,
            "cpu/lost": 0.0,
            "cpu/idle": 9.0,
        }
    )
    assert made["cost/idle_share/train"] == pytest.approx(0.35)
    assert made["cost/device_hours"] == pytest.approx(160 / 3600), "GPUs, where there are any"
    assert made["cost/so_far/device_hours"] == pytest.approx(1 + 160 / 3600)
    assert made["cost/money"] == pytest.approx(0.16 + 0.002)
    assert made["cost/so_far/money"] == pytest.approx(0.162)
    assert made["cost/per_sample/device_seconds"] == pytest.approx(16.0)
    assert made["cost/per_sample/money"] == pytest.approx(0.0162)
    assert (made["cost/joules/train"], made["cost/per_sample/joules"]) == (500.0, 50.0)
    assert made["cost/gpu_busy/train"] == 0.75
    assert "cost/joules/cpu" not in made and "cost/gpu_busy/cpu" not in made, "nothing told"


def test_what_calls_alone_come_to() -> None:
    """4 GPUs of a worker for 9 s are 36 device-seconds: 0.01 h, at 3.6 an hour 0.036."""
    made = calls_cost({"train": 9.0, "cpu": 36.0, "gone": 1.0}, POOLS)
    assert made == pytest.approx(
        {
            "device_seconds/train": 36.0,
            "device_seconds/cpu": 36.0,
            "device_hours": 0.01,  # of GPUs
            "money": 0.036 + 0.0036,
        }
    )
    plain = calls_cost({"cpu": 36.0}, {"cpu": Pool(workers=2)})
    assert plain == pytest.approx({"device_seconds/cpu": 36.0, "device_hours": 0.01})


def test_without_prices_there_is_no_money() -> None:
    window = Window(begin=0.0, end=1.0, launched=False)
    made = step_cost([], window, {"cpu": Pool(workers=3)}, {}, {}, samples=0)
    assert not [name for name in made if "money" in name or "per_sample" in name]
    assert made["cost/device_hours"] == pytest.approx(3 / 3600), "workers, where no pool has GPUs"
    assert made["cost/device_seconds/cpu/starting"] == 0.0


def test_windows_follow_each_other_while_one_flow_runs() -> None:
    assert window_of(100.0, None, 120.0) == Window(begin=100.0, end=120.0, launched=True)
    assert window_of(100.0, 120.0, 130.0) == Window(begin=120.0, end=130.0, launched=False)
    resumed = window_of(500.0, 130.0, 520.0)
    assert resumed == Window(begin=500.0, end=520.0, launched=True), "the days between cost nothing"


def test_what_a_flow_held_until_it_died_is_lost() -> None:
    """It began at 90, committed a step at 130, was last seen at 150; this one began at 500."""
    window = window_of(500.0, 130.0, 520.0, died=(90.0, 150.0))
    assert window == Window(begin=500.0, end=520.0, launched=True, died=20.0)
    assert window_of(500.0, None, 520.0, died=(90.0, 150.0)).died == 60.0, "it committed nothing"
    assert window_of(500.0, 510.0, 520.0, died=(90.0, 150.0)).died == 0.0, "told once"
    assert window_of(500.0, 130.0, 520.0, died=(90.0, 120.0)).died == 0.0
    made = step_cost([], window, {"cpu": Pool(workers=3)}, {}, {}, samples=1)
    assert made["cost/device_seconds/cpu/lost"] == 60.0
    assert made["cost/device_seconds/cpu/held"] == 120.0
    assert made["cost/device_seconds/cpu/starting"] == 60.0
    assert made["cost/device_seconds/cpu/idle"] == 0.0


def test_a_call_of_an_older_refrain_has_no_seconds() -> None:
    old = {"stage": "rollout", "started": 1.0, "seconds": 2.0, "error": "", "worker": "rollout-0"}
    assert AttemptCost.of(old).worker_seconds == {}


def test_gpus_are_the_devices_where_there_are_any() -> None:
    assert counted(POOLS) == ["train"]
    assert counted({"a": Pool(workers=1), "b": Pool(workers=2)}) == ["a", "b"]


def test_docs_name_every_metric() -> None:
    page = (Path(__file__).parents[3] / "docs/cost.md").read_text()
    made = step_cost(
        CALLS, Window(begin=100.0, end=120.0, launched=True), POOLS,
        {"train": Used(joules=1.0)}, {}, samples=1,
    )  # fmt: skip
    named = set(re.findall(r"`(cost/[^`]+)`", page))
    for name in made:
        pool = re.sub(r"/(train|cpu)(?=/|$)", "/POOL", name)
        generic = re.sub(r"(POOL)/(prompts|update)$", r"\1/STAGE", pool)
        assert generic in named, generic
