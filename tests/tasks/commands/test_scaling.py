"""What `refrain scaling` takes for compute and for reward, and what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from flows import scaling
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from storage.tracking.scaling_law import Curve
from tests.storage.audit import small_run

LAW = Curve(start=0.1, asymptote=0.7, midpoint=2.0, exponent=1.5)


def a_run(store: Store, name: str, told: bool, steps: int = 16) -> RunStore:
    """A run along the law at half a device-hour a step; `told`: whether its commits say so."""
    run, before = RunStore(store, name), None
    config = load_recipe(GRPOConfig, "tiny").model_dump(mode="json")
    run.write_run({"config": config, "code": "0.1.0", "flow": "flows.grpo:grpo"})
    noise = np.random.default_rng(0).normal(0.0, 0.002, steps)
    for step in range(1, steps + 1):
        reward = float(LAW.at(np.array([step / 2]))[0] + noise[step - 1])
        metrics = {"reward/mean": reward, "time/step": 600.0}  # of three workers: half an hour
        if told:
            metrics["cost/so_far/device_hours"] = step / 2
        before = small_run.take(run, step, before, metrics=metrics)
    return run


def said(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["scaling", *words, f"store.uri={store.uri}"])
    code = scaling.main()
    out = capsys.readouterr()
    return code, out.out, out.err


def test_runs_are_fitted_and_drawn_together(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    a_run(store, "new", told=True)
    a_run(store, "old", told=False)
    a_run(store, "short", told=True, steps=4)
    picture = tmp_path / "law.png"
    words = ("new", "old", "short", "--json", "--picture", str(picture))
    code, out, _ = said(store, monkeypatch, capsys, *words)
    record = json.loads(out)
    new, old, short = record["runs"]
    assert code == 1, "one of them says too little"
    assert record["unit"] == "worker-hours"
    assert new["parameters"] == old["parameters"], (
        "an older commit's compute is made of its seconds"
    )
    assert new["parameters"]["A"]["low"] < 0.7 < new["parameters"]["A"]["high"]
    assert [one["compute"] for one in new["forecast"]] == [16.0, 32.0, 80.0]
    assert "4 points are too few" in short["refused"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_metric_that_is_not_there_is_one_sentence(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(store, "new", told=True, steps=2)
    code, _, err = said(store, monkeypatch, capsys, "new", "--of", "reward/men")
    assert code == 2
    assert (
        err
        == "--of reward/men: run new has nothing of that name. Did you mean reward/mean or reward?\n"
    )
    code, _, err = said(store, monkeypatch, capsys, "new", "--of", "eval/gsm8k/reward")
    assert err.endswith("It has no evaluations.\n")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/store")
