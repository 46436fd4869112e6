"""Grafana's questions to the Prometheus endpoint of a real run."""

from __future__ import annotations

import json
import re

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from configs.storage import TrackingConfig
from storage.runs.commit_log import read_commit
from storage.runs.run_store import RunStore
from tasks.reporting.prometheus import LiveMetrics
from tasks.run.metrics import numbers_of
from tests.flows.conftest import ROOT
from tests.ports import free_port

SELECTOR = re.compile(r"(?P<gauge>refrain_\w+)\{(?P<labels>[^}]*)\}")
LABEL = re.compile(r'(\w+)(=~|=)"([^"]*)"')
NOT_IN_TINY = {"train/kl_ref"}  # it has no reference


def samples_of(undisturbed: RunStore) -> list[Sample]:
    """What the endpoint told when the last step had been committed."""
    commit, port = read_commit(undisturbed, 6), free_port()
    live = LiveMetrics(undisturbed.run, steps=6)
    with live.served(TrackingConfig(prometheus_port=port)):
        live.committed(commit.step, commit.committed_at, numbers_of(commit))
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").raise_for_status().text
    return [one for family in text_string_to_metric_families(text) for one in family.samples]


def found(samples: list[Sample], expression: str, run: str) -> list[str]:
    """Names of the metrics that a question selects, the variable $run being this one."""
    (selector,) = SELECTOR.finditer(expression)
    labels = LABEL.findall(selector["labels"].replace("$run", re.escape(run)))
    assert len(labels) == selector["labels"].count("=")

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
        if one.name == selector["gauge"] and fits(one)
    ]


def test_every_question_of_the_page_finds_something(undisturbed: RunStore) -> None:
    samples = samples_of(undisturbed)
    page = json.loads((ROOT / "infra/grafana.json").read_text())
    asked = [one["expr"] for panel in page["panels"] for one in panel["targets"]]
    nothing = [one for one in asked if not found(samples, one, undisturbed.run)]
    assert [re.findall('metric="([^"]+)"', one) for one in nothing] == [[n] for n in NOT_IN_TINY]
    stages = found(samples, 'refrain_metric{run=~"$run", metric=~"time/.*"}', undisturbed.run)
    assert {"time/rollout", "time/update", "time/step"} <= set(stages)
    assert not found(samples, asked[0], "another-run")
