"""The note of an evaluation: each figure is one of its stored result's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from storage.batches.writing import write_batch
from storage.evaluations.results import ConfidenceInterval, EvaluationResult
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from storage.runs.weights import WeightsRef
from tasks.reporting.artifacts import evaluation_note as note
from tests.traced import Record, check_figures, figure


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
        "intervals": {"reward": ConfidenceInterval(low=0.25, high=0.75, kind="bootstrap")},
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
    files = RunStore(store, "a")
    said = note(files, config, result(store), 20)
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
    older = note(files, config, result(store, cost={}, asked_by="b"), 20)
    assert "Device-seconds" not in older and "made for b" in older


VALUES = {"reward": 0.5, "pass@2": 0.625, "mean@4": 0.375, "failed": 3.0, "tokens": 17.5}


def test_every_number_of_the_note_is_a_field_of_the_stored_result(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    config = load_recipe(GRPOConfig, "tiny", ["cluster.currency=EUR"])
    files = RunStore(store, "a")
    weights = {"version": 20, "key": "w", "digest": "xxh3:a", "nbytes": 4}
    record = result(store, metrics=VALUES | {"samples": 30.0}, weights=weights).model_dump()

    def page(record: Record) -> str:
        found = EvaluationResult.model_validate(record)
        return note(files, config, found, found.version)

    figures = [
        figure("metrics", name, value=9.5, shown=[(f"| {name} | {value:g} |", f"| {name} | 9.5 |")])
        for name, value in VALUES.items()
    ]
    check_figures(record, page, [
        *figures,
        figure("metrics", "samples", value=40.0, shown=[
            ("30 samples by", "40 samples by"), ("| samples | 30 |", "| samples | 40 |")]),
        figure("weights", "version", value=21, shown=[("sums on version 20", "sums on version 21"), ("sums@20", "sums@21")]),
        figure("weights", "digest", value="xxh3:b", shown=[("xxh3:a", "xxh3:b")]),
        figure("key", value="k2", shown=[("_evaluations/k1", "_evaluations/k2")]),
        figure("asked", value=11, shown=[("10 prompts", "11 prompts")]),
        figure("intervals", "reward", "low", value=0.125, shown=[("0.2500 to", "0.1250 to")]),
        figure("intervals", "reward", "high", value=0.875, shown=[("to 0.7500", "to 0.8750")]),
        figure("cost", "device_seconds/test", value=19.5, shown=[("test 18.0;", "test 19.5;")]),
        figure("cost", "device_hours", value=0.25, shown=[("0.005 device-h", "0.25 device-h")]),
        figure("cost", "money", value=0.5, shown=[("EUR 0.01.", "EUR 0.5.")]),
    ], frozenset({"pass@2", "mean@4", "95"}))  # fmt: skip
