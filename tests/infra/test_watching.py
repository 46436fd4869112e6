"""The alert rules and the Grafana board ask for what there is, and the rules fire."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tasks.reporting.test_prometheus import shown, with_everything

ROOT = Path(__file__).parents[2]
# The rules' own series, and those that Prometheus makes.
RECORDED = {"refrain:flow_alive", "refrain_exporter_runs", "refrain_exporter_unreadable_files"}
NAME = re.compile(r"\b(?:refrain|vllm)[:_][a-z0-9_:]+")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (apt: prometheus)"
)


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "infra/grafana.json").read_text())
    return found


def questions_of_the_board() -> list[str]:
    """Those of its panels, and of its variables."""
    page = board()
    asked = [one["expr"] for panel in page["panels"] for one in panel.get("targets", [])]
    return asked + [one["query"] for one in page["templating"]["list"] if one["type"] == "query"]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((ROOT / "infra/alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def plain(name: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", name)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of all metrics of a run."""
    return set(shown(with_everything(tmp_path_factory.mktemp("run"))))


def test_every_question_names_metrics_that_there_are(there: set[str]) -> None:
    asked = [*questions_of_the_board(), *(rule["expr"] for rule in rules())]
    assert len(asked) > 60
    for expression in asked:
        without_values = re.sub(r'"[^"]*"', '""', expression)
        names = set(NAME.findall(without_values)) - RECORDED
        assert names or "up{" in expression or "ALERTS{" in expression
        for name in names:
            if name.startswith("refrain"):
                assert name in there, (name, expression)


def test_every_metric_of_the_commit_that_is_asked_for_is_made_somewhere() -> None:
    code = "\n".join(
        path.read_text()
        for folder in ("engines", "storage", "tasks")
        for path in (ROOT / folder).rglob("*.py")
    )
    asked = [*questions_of_the_board(), *(rule["expr"] for rule in rules())]
    names = {name for one in asked for name in re.findall(r'metric=~?"([^"]+)"', one)}
    assert len(names) > 12
    for name in names:
        prefix, _, last = name.removesuffix(".*").rpartition("/")
        assert f"{prefix}/{last}" in code or f'"{last}"' in code, name


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_vllms_metrics_that_are_asked_for_are_vllms() -> None:
    from tasks.reporting.prometheus import VLLM_HISTOGRAMS

    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    code = (Path(spec.origin).parent / "v1/metrics/loggers.py").read_text()
    asked = {
        name for one in questions_of_the_board() for name in NAME.findall(one) if name[:4] == "vllm"
    }
    assert len(asked) > 7
    for name in {plain(name).removesuffix("_total") for name in asked} | VLLM_HISTOGRAMS:
        assert f'"{name}"' in code, name
    histograms = {plain(name) for name in asked if name.endswith("_bucket")}
    assert histograms <= VLLM_HISTOGRAMS, "others are not passed on"


def test_the_board_tells_runs_apart() -> None:
    page = board()
    variables = {one["name"]: one for one in page["templating"]["list"]}
    assert {"datasource", "flow", "recipe", "run", "host"} == variables.keys()
    assert all(one["multi"] for name, one in variables.items() if name != "datasource")
    panels = [panel for panel in page["panels"] if panel["type"] != "row"]
    assert len(panels) > 30
    for panel in panels:
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert 'run=~"$run"' in target["expr"], target
            assert "{{run}}" in target["legendFormat"], target
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in page["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in page["panels"]}) == len(page["panels"])


@needs_promtool
def test_promtool_takes_the_rules_and_the_settings() -> None:
    for words in (("rules", "infra/alerts.yaml"), ("config", "infra/prometheus.yaml")):
        done = subprocess.run(
            ["promtool", "check", *words], cwd=ROOT, capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_each_rule_fires_on_what_it_is_about() -> None:
    tests = yaml.safe_load((ROOT / "tests/infra/alerts_test.yaml").read_text())["tests"]
    fired = {one["alertname"] for test in tests for one in test["alert_rule_test"]}
    assert fired == {rule["alert"] for rule in rules() if "alert" in rule}
    done = subprocess.run(
        ["promtool", "test", "rules", "tests/infra/alerts_test.yaml"],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_in_the_documentation() -> None:
    page = (ROOT / "docs/monitoring.md").read_text()
    for rule in rules():
        assert rule.get("alert", "") in page


@needs_promtool
def test_each_question_of_the_board_is_one_to_prometheus(tmp_path: Path) -> None:
    asked = [one for one in questions_of_the_board() if not one.startswith("label_values")]
    plain_text = [
        one.replace("$__rate_interval", "1m").replace("$run", ".*").replace("$host", ".*")
        for one in asked
    ]
    named = [{"record": f"asked:n{n}", "expr": one} for n, one in enumerate(plain_text)]
    rules_file = tmp_path / "board.yaml"
    rules_file.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": named}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", str(rules_file)],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
