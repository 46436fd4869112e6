"""The machine's samples on a run's page."""

from __future__ import annotations

import threading
import time

import pytest

from configs.storage import TrackingConfig
from storage.tracking.tracker import Tracker
from tests.storage.tracking.test_tracker import client, page


def test_the_machine_is_sampled_until_the_page_ends_without_reading_the_run(
    config: TrackingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient
    from mlflow.entities import Run

    read = MlflowClient.get_run

    def get_run(self: MlflowClient, run_id: str) -> Run:
        assert threading.current_thread().name != "SystemMetricsMonitor"
        return read(self, run_id)

    monkeypatch.setattr(MlflowClient, "get_run", get_run)
    before = set(threading.enumerate())
    often = Tracker(config.model_copy(update={"system_metrics": 1}))
    never = Tracker(config.model_copy(update={"system_metrics": 0}))
    for tracker in (often, never):
        tracker.start(page(f"machine {tracker is often}"))
    mlflow, deadline = client(config), time.monotonic() + 60
    name = "system/cpu_utilization_percentage"
    while name not in mlflow.get_run(often.run_id).data.metrics and time.monotonic() < deadline:
        time.sleep(0.2)
    for tracker in (often, never):
        tracker.finish()
    assert mlflow.get_run(often.run_id).data.metrics["system/system_memory_usage_megabytes"] > 0
    assert not mlflow.get_run(never.run_id).data.metrics
    assert not [one for one in threading.enumerate() if one.is_alive() and one not in before]


def test_samples_of_the_machine_wait_for_an_mlflow_that_is_away(
    config: TrackingConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow import MlflowClient

    log, refused = MlflowClient.log_batch, []

    def log_batch(self: MlflowClient, *args: object, **given: object) -> object:
        if threading.current_thread().name == "SystemMetricsMonitor" and len(refused) < 2:
            refused.append(given)
            raise ConnectionError("it is away")
        return log(self, *args, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    tracker = Tracker(config.model_copy(update={"system_metrics": 1}))
    tracker.start(page("away"))
    mlflow, deadline = client(config), time.monotonic() + 60
    name = "system/cpu_utilization_percentage"
    while len(found := mlflow.get_metric_history(tracker.run_id, name)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    tracker.finish()
    assert len(refused) == 2
    assert {0, 1, 2} <= {one.step for one in found}, "those of the outage came after it"
    said = [one.message for one in caplog.records if "wait for MLflow" in one.message]
    assert said == ["Samples of this machine wait for MLflow: it is away"]
