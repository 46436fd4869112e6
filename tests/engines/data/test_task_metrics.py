"""Metrics of each of several tasks."""

from __future__ import annotations

import numpy as np

from engines.data.sample_metrics import SampleValues, sample_metrics, task_metrics


def test_each_task_has_the_metrics_of_its_samples() -> None:
    nan = float("nan")
    measured = SampleValues(
        rewards=np.array([1, 0, 0.5, nan, nan], np.float32),
        components={"right": np.array([1, 0, nan, nan, nan], np.float32)},
        failed=np.array([False, False, False, True, True]),
        truncated=np.array([False, True, False, False, False]),
        lengths=np.array([2, 4, 6, 8, 10]),
        groups=np.array([0, 0, 1, 1, 2]),
    )
    tasks = np.array(["a", "a", "b", "b", "c"])
    found = task_metrics(measured, tasks, right_from=0.5)
    assert (found["task/a/prompts"], found["task/a/right"]) == (1, 0.5)
    assert (found["task/b/prompts"], found["task/b/right"]) == (1, 1.0)
    assert found["task/a/reward/right"] == 0.5 and "task/b/reward/right" not in found
    assert found["task/a/response/truncated_fraction"] == 0.5
    assert found["task/b/reward/mean"] == 0.5, "a failed sample counts nowhere"
    assert found["task/c/samples/failed"] == 1 and "task/c/right" not in found
    own = sample_metrics(measured.at(tasks == "b"))
    assert all(found[f"task/b/{name}"] == value for name, value in own.items())
