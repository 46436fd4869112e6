"""The note of an evaluation: each figure is one of its stored result's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from storage.batches.writing import write_batch
from storage.evaluations.results import EvaluationResult, Interval
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from storage.runs.weights import WeightsRef
from tasks.evaluation.page import note


def result(store: Store, **changes: Any) -> EvaluationResult:
    samples = write_batch(store, "samples", {"reward": np.ones(1, np.float32)})
    fields: dict[str, Any] = {
        "key": "k1",
        "suite": "sums",
        "weights": WeightsRef(version=9, key="w", digest="xxh3:a", nbytes=4),
        "engine": "transformers",
        "on": "rows",
        "metrics": {
            "reward": 0.5,
            "reward_low": 0.25,
            "reward_high": 0.75,
            "pass@2": 0.625,
            "samples": 30.0,
            "failed": 0.0,
        },
        "intervals": {"reward": Interval(low=0.25, high=0.75, kind="bootstrap")},
        "asked": 10,
        "samples": samples,
        "prompts": samples,
        "right_from": 1.0,
        "seconds": 0.1,
        "asked_by": "a",
        "cost": {"device_seconds/test": 18.0, "device_hours": 0.005, "money": 0.01},
    }
    return EvaluationResult(**fields | changes)


def test_the_note_has_what_the_result_has(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    config = load_recipe(GRPOConfig, "tiny", [f"store.uri={store.uri}", "cluster.currency=EUR"])
    caller: Any = SimpleNamespace(files=RunStore(store, "a"), store=store, config=config)
    said = note(caller, result(store), 20)
    for text in (
        "version 20 of a",
        "10 prompts, 30 samples by transformers",
        f"`file://{tmp_path}/_evaluations/k1`",
        "| reward | 0.5 | 0.2500 to 0.7500 (bootstrap) |",
        "pass@2 | 0.625 |",
        "Device-seconds of its calls: test 18.0; 0.005 device-hours, EUR 0.01.",
        "--evaluation sums@20 --worst",
    ):
        assert text in said, said
    assert "low |" not in said and "made for" not in said
    older = note(caller, result(store, cost={}, asked_by="b"), 20)
    assert "Device-seconds" not in older and "made for b" in older
