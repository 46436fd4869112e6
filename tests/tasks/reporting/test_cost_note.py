"""What the page of a step says of its cost."""

from __future__ import annotations

from storage.tracking.cost import AttemptCost, Pool, Used, Window, step_cost
from tasks.reporting.artifacts import cost_lines

WINDOW = Window(begin=0.0, end=10.0, launched=False)
CALLS = [
    AttemptCost(stage="update", started=1.0, failed=False, worker_seconds={"train": 4.0}),
    AttemptCost(stage="update", started=5.0, failed=True, worker_seconds={"train": 1.0}),
]


def test_a_line_for_each_pool_and_what_it_comes_to() -> None:
    pools = {"cpu": Pool(workers=1), "train": Pool(workers=1, gpus=2, price_per_hour=3.6)}
    used = {"train": Used(cpu_seconds=3.0, joules=700.0, busy=0.25), "cpu": Used(cpu_seconds=1.0)}
    metrics = step_cost(CALLS, WINDOW, pools, used, {"cost/so_far/money": 1.0}, samples=8)
    lines = cost_lines({**metrics, "rollout/tokens": 321.0}, "EUR")
    assert lines[2] == "| cpu | 10.0 | - | 0.0 | 0.0 | 10.0 (100%) |"
    assert lines[3] == "| train | 20.0 | update 8.0 | 2.0 | 0.0 | 10.0 (50%) |"
    said = "Processor-seconds: cpu 1.0, train 3.0. Joules of GPUs: train 700."
    assert f"{said} GPUs with a kernel to run: train 25% of the time." in lines
    assert "2.5 device-seconds for each sample; 321 tokens sampled." in lines[-1]
    assert "EUR 0.02 of the step, 1.02 of the version, 0.0025 for each sample." in lines[-1]


def test_without_prices_there_is_no_currency_and_an_old_commit_says_nothing() -> None:
    metrics = step_cost(CALLS, WINDOW, {"train": Pool(workers=1)}, {}, {}, samples=1)
    lines = cost_lines(metrics, "USD")
    assert "USD" not in lines[-1] and "Joules of GPUs: no driver told." in lines[-3]
    assert cost_lines({"reward/mean": 1.0}, "USD") == []
