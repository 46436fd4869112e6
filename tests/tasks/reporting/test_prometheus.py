"""The live run as Prometheus reads it, over HTTP, and the Grafana page that shows it."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from configs.overrides import ConfigError
from configs.storage import TrackingConfig
from tasks.reporting.prometheus import LiveMetrics
from tests.ports import free_port

ROOT = Path(__file__).parents[3]


def read(port: int) -> dict[tuple[str, str], float]:
    """(name, metric label) -> value, of all samples."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").raise_for_status().text
    return {
        (sample.name, sample.labels.get("metric", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_last_step_is_told_while_the_run_lives() -> None:
    live, port = LiveMetrics("tiny-1", steps=9), free_port()
    with live.served(TrackingConfig(prometheus_port=port)):
        assert read(port)["refrain_steps_asked", ""] == 9
        live.committed(1, 1e9, {"reward/mean": 0.5, "train/loss": 0.1})
        live.committed(2, 1e9 + 7, {"reward/mean": 0.75})
        found = read(port)
    assert found["refrain_step", ""] == 2
    assert found["refrain_committed_timestamp_seconds", ""] == 1e9 + 7
    assert found["refrain_metric", "reward/mean"] == 0.75
    assert ("refrain_metric", "train/loss") not in found, "the step made no update"
    with pytest.raises(httpx.ConnectError):
        read(port)


def test_without_a_port_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object, **named: object) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr("tasks.reporting.prometheus.start_http_server", refuse)
    with LiveMetrics("tiny-1", steps=9).served(TrackingConfig()):
        pass


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"prometheus_port = {port} cannot be opened"),
            LiveMetrics("tiny-1", steps=9).served(TrackingConfig(prometheus_port=port)),
        ):
            pass


def test_the_grafana_page_asks_for_gauges_and_metrics_that_there_are() -> None:
    page = json.loads((ROOT / "infra/grafana.json").read_text())
    live = LiveMetrics("tiny-1", steps=9)
    live.committed(1, 1e9, {})
    there = {family.name for family in live.registry.collect()}
    code = "\n".join(
        path.read_text()
        for folder in ("engines", "storage", "tasks")
        for path in (ROOT / folder).rglob("*.py")
    )
    asked = [target["expr"] for panel in page["panels"] for target in panel["targets"]]
    assert len(asked) > 10
    for expression in asked:
        assert set(re.findall(r"refrain_\w+", expression)) <= there
        for name in re.findall(r'metric=~?"([^"]+)"', expression):
            prefix, _, last = name.removesuffix(".*").rpartition("/")
            assert f"{prefix}/{last}" in code or f'"{last}"' in code, name
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in page["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in page["panels"]}) == len(places)
