"""Grafana's questions to what a real run left."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from storage.runs.run_store import RunStore
from tests.flows.conftest import ROOT

SELECTOR = re.compile(r"(?P<name>(?:refrain|vllm)[\w:]+)\{(?P<labels>[^}]*)\}")
LABEL = re.compile(r'(\w+)(=~|=)"([^"]*)"')
NOT_IN_TINY = {"train/kl_ref"}  # it has no reference
# No failure befell it, and the machine may have no GPU; tiny's engine is that of transformers.
NOT_HERE = re.compile(r"refrain_(stage_failures|reward_function_failures|gpu_)|vllm:")


def samples_of(undisturbed: RunStore) -> list[Sample]:
    """What the run left for the exporter."""
    folder = Path(undisturbed.store.uri.removeprefix("file://")).parent / "metrics"
    text = (folder / f"{undisturbed.run}.prom").read_text()
    return [one for family in text_string_to_metric_families(text) for one in family.samples]


def found(samples: list[Sample], selector: re.Match[str], run: str) -> list[str]:
    """Names of the metrics that a selector finds, the variable $run being this one."""
    wanted = selector["labels"].replace("$run", re.escape(run)).replace("$host", ".*")
    labels = LABEL.findall(wanted)
    assert len(labels) == wanted.count("=")

    def fits(sample: Sample) -> bool:
        return all(
            re.fullmatch(value, sample.labels.get(name, ""))
            if how == "=~"
            else value == sample.labels.get(name, "")
            for name, how, value in labels
        )

    return [
        one.labels.get("metric", one.name)
        for one in samples
        if one.name == selector["name"] and fits(one)
    ]


def test_every_question_of_the_page_finds_something(undisturbed: RunStore) -> None:
    samples = samples_of(undisturbed)
    page = json.loads((ROOT / "infra/grafana.json").read_text())
    asked = [one["expr"] for panel in page["panels"] for one in panel.get("targets", [])]
    selectors = [one for expression in asked for one in SELECTOR.finditer(expression)]
    assert len(selectors) > 50
    nothing = [one for one in selectors if not found(samples, one, undisturbed.run)]
    missing = [one for one in nothing if not NOT_HERE.match(one["name"])]
    assert [re.findall('metric="([^"]+)"', one[0]) for one in missing] == [[n] for n in NOT_IN_TINY]
    (stages,) = (one for one in selectors if 'metric=~"time/.*"' in one["labels"])
    shown = set(found(samples, stages, undisturbed.run))
    assert {"time/rollout", "time/update", "time/step"} <= shown
    assert not found(samples, stages, "another-run")
