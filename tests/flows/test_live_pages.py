"""Pages over a real run: its steps on the dashboard, and Grafana's questions to what it left."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from storage.batches.columns import SampleStatus
from storage.runs.commit_log import read_commit
from storage.runs.run_store import RunStore
from storage.runs.stage_store import DATA_SUFFIX
from tasks.reporting.artifacts import key, lineage
from tasks.run.recorded_flow import settings_of
from tests.flows.conftest import ROOT, starting
from tests.traced import attempts_of

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


@pytest.fixture(scope="module")
def seen(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunStore]:
    """Two steps on the server of this process of the tests."""
    with starting(tmp_path_factory.mktemp("seen"), prefect_api) as start:
        yield start("tiny", "steps=2").whole().files


def artifacts_of(run: RunStore, prefect_api: str, what: str) -> list[Any]:
    """The data of an artifact of each step, ascending."""
    wanted = {"artifacts": {"key": {"any_": [key(run.run, what)]}}}
    found = httpx.post(f"{prefect_api}/artifacts/filter", json=wanted).raise_for_status().json()
    return [one["data"] for one in sorted(found, key=lambda one: one["created"])]


@pytest.mark.cluster
def test_the_page_of_each_step_is_made_again_from_its_commit_alone(
    seen: RunStore, prefect_api: str
) -> None:
    run: Any = SimpleNamespace(
        name=seen.run,
        store=seen.store,
        origin=None,
        config=settings_of(seen),
    )
    commits = [read_commit(seen, step) for step in (1, 2)]
    pages = [lineage(run, commit, attempts_of(commit)) for commit in commits]
    assert artifacts_of(seen, prefect_api, "lineage") == pages


@pytest.mark.cluster
def test_the_table_of_shards_is_in_the_columns_of_the_samples(
    seen: RunStore, prefect_api: str
) -> None:
    store, commit = seen.store, read_commit(seen, 2)
    table = json.loads(artifacts_of(seen, prefect_api, "shards")[-1])
    samples, first = commit.refs["samples"], 0
    assert sum(row["samples"] for row in table) == len(samples) > 0
    for row in table:
        own = samples.rows(first, first + row["samples"])
        first += row["samples"]
        spans, _ = own.fetch_numpy(store, "weight_spans")
        marker = next(one for one in own.objects if "/rollout/" in one)
        record = seen.finished(marker)
        assert record is not None and marker.endswith(DATA_SUFFIX)
        seconds = record["stats"]["seconds"]  # type: ignore[index]
        tokens = int(own.lengths(store, "response_ids").sum())
        status = own.fetch_numpy(store, "status")[0]
        assert row == {
            "shard": row["shard"],
            "worker": one_of(own.fetch_list(store, "worker")),
            "attempt": one_of(own.fetch_list(store, "attempt")),
            "samples": len(own),
            "tokens": tokens,
            "tokens/s": round(tokens / seconds, 1),
            "seconds": round(seconds, 2),
            "truncated": int((status == SampleStatus.TRUNCATED).sum()),
            "scoring failed": int(np.isnan(own.fetch_numpy(store, "reward")[0]).sum()),
            "policy version": int(spans.reshape(-1, 3)[:, 0].max()),
            "weights held": one_of(own.fetch_list(store, "weights_digest")),
        }


def one_of(values: list[Any]) -> Any:
    """The one value that all of them are."""
    (value,) = set(values)
    return value
