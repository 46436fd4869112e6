"""What MLflow's page of a run does with what it hears."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tasks.reporting import mlflow_page
from tasks.reporting.mlflow_page import RunTracker
from tasks.run.events import Listeners, SnapshotStored, StepCommitted


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a page is asked for, in order."""
    asked: list[str] = []
    monkeypatch.setattr(mlflow_page, "PageWriter", lambda config, say: SimpleNamespace())
    monkeypatch.setattr(RunTracker, "_ready", lambda tracker: "page")
    monkeypatch.setattr(
        RunTracker, "_log", lambda tracker, page, commit: asked.append(f"step {commit.step}")
    )
    monkeypatch.setattr(
        RunTracker,
        "_register",
        lambda tracker, page, commit: asked.append(f"version of {commit.step}"),
    )
    monkeypatch.setattr(RunTracker, "tag", lambda tracker, name, value: asked.append(name))
    monkeypatch.setattr(mlflow_page, "numbers_of", lambda record: record.metrics)
    monkeypatch.setattr(mlflow_page, "marked", lambda metrics: "changed" if metrics else "")
    return asked


def committed(step: int, snapshot: bool, metrics: dict[str, float]) -> StepCommitted:
    record: Any = SimpleNamespace(step=step, metrics=metrics)
    return StepCommitted(record=record, metrics={}, scored=[], attempts=[], snapshot=snapshot)


def test_a_version_is_registered_where_the_trainers_state_is_stored(told: list[str]) -> None:
    facts: Any = SimpleNamespace(config=SimpleNamespace(tracking=None))
    listeners = Listeners()
    RunTracker(facts, print).listen(listeners)
    listeners.tell(committed(1, False, {}))
    listeners.tell(committed(2, True, {"meaning/reward": 2.0}))
    record: Any = SimpleNamespace(step=3)
    listeners.tell(SnapshotStored(record=record))
    listeners.drain()
    assert told == [
        "step 1", "step 2", "refrain.meaning_changed.2", "version of 2", "version of 3",
    ]  # fmt: skip
