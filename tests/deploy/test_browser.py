"""The dashboard and MLflow's pages in a headless browser: form, graph, artifacts and curves, no error.

With REFRAIN_SCREENSHOTS=FOLDER the pictures of docs/dashboard.md and docs/monitoring.md are written there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlflow import MlflowClient

from storage.tracking.connection import has_pages
from storage.tracking.tracker import CURVES
from tests.browser import Browser, browser
from tests.deploy.conftest import API, Platform, end
from tests.ports import free_port

__all__ = ["browser"]

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SUITE = {
    "source": {"kind": "reasoning_gym", "task": "chain_sum", "size": 12, "seed": 5},
    "samples": 4,
    "greedy": False,
    "pass_at": [1, 4],
    "right_from": 0.2,
}


# What MLflow 3.17.2's pages complain of: a server without users, versions whose files lie in a store of
# ours and so bring no MLmodel, and their own layout.
MLFLOWS_OWN = ("mlflow/users/current", "?path=MLmodel", "404 (Not Found)", "ResizeObserver loop")


@dataclass(frozen=True)
class Finished:
    """A run that was started from its deployment, and has ended."""

    flow_run: str
    steps: list[dict[str, Any]]  # flow runs, by time
    artifacts: dict[str, str]  # the last part of the key -> id of the newest
    tracking_uri: str


@pytest.fixture(scope="module")
def finished(platform: Platform) -> Finished:
    changes: dict[str, Any] = {"steps": 6, "evaluation": {"every": 2, "suites": {"sums": SUITE}}}
    changes |= {f"cluster.pools.{pool}.price_per_hour": 2.5 for pool in ("train", "rollout")}
    config = platform.config("tiny", **changes)
    submitted = platform.submit("tiny", config)
    assert submitted.status_code == 201, submitted.text
    run = submitted.json()["id"]
    platform.wait(run, "COMPLETED")
    mine = {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}, "sort": "START_TIME_ASC"}
    children = API.post(f"{platform.api}/flow_runs/filter", json=mine).json()
    made = API.post(f"{platform.api}/artifacts/filter", json={}).json()
    made.sort(key=lambda one: one["created"])
    return Finished(
        flow_run=run,
        steps=[one for one in children if one["name"].startswith("step")],
        artifacts={one["key"].rpartition("-")[2]: one["id"] for one in made},
        tracking_uri=config["tracking"]["uri"],
    )


def test_a_finished_run_and_the_form_show_without_an_error(
    platform: Platform, browser: Browser, finished: Finished
) -> None:
    run, steps, artifacts = finished.flow_run, finished.steps, finished.artifacts
    board = platform.dashboard

    shown = browser.open(
        f"{board}/deployments/deployment/{platform.deployment('tiny')['id']}/run",
        "Prompts per step",
    )
    for text in ("Completions sampled for each prompt;", "KV cache (GiB)", "pretrained", "random"):
        assert text in shown
    browser.picture("form", 1700)

    shown = browser.open(f"{board}/runs/flow-run/{run}", "Completed", "Artifacts")
    assert "refrain" in shown  # the work pool
    browser.picture("run")
    browser.open(f"{board}/runs/flow-run/{steps[1]['id']}", "Completed", "Artifacts")
    browser.picture("step")

    shown = browser.open(f"{board}/artifacts/artifact/{artifacts['lineage']}", "Batches")
    for text in ("Sampled with", "digest", "Where the time went", "retries", "rollout-0"):
        assert text in shown
    browser.picture("lineage", 1200)
    browser.page.set_viewport_size({"width": 1300, "height": 520})
    cost = browser.page.get_by_text("What it cost")
    cost.evaluate("heading => heading.scrollIntoView()")
    for text in ("device-seconds", "USD", "of the version", "Processor-seconds"):
        assert text in shown
    browser.picture("cost", 520)

    shown = browser.open(f"{board}/artifacts/artifact/{artifacts['sums']}", "95 % interval")
    for text in ("48 samples", "pass@4", "bootstrap", "device-hours", "--evaluation sums@6"):
        assert text in shown
    browser.picture("evaluation", 820)
    browser.open(f"{board}/artifacts/artifact/{artifacts['curves']}", "Reward, KL and time")
    width = browser.page.evaluate("() => document.querySelector('img[src^=data]').naturalWidth")
    assert width > 500
    browser.picture("curves", 1000)
    shown = browser.open(f"{board}/artifacts/artifact/{artifacts['run']}", "Flow process")
    assert "Store" in shown and "MLflow" in shown
    browser.picture("note", 700)
    assert browser.errors == []


@pytest.fixture
def mlflow_pages(finished: Finished, tmp_path: Path) -> Iterator[str]:
    """MLflow's own server over what the run told it."""
    if not has_pages():
        pytest.skip("needs the extra ui")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    words = ["server", "--backend-store-uri", finished.tracking_uri, "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", *words, "--workers", "1"],
            cwd=tmp_path, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            assert server.poll() is None, (tmp_path / "log").read_text()
            with suppress(httpx.HTTPError):
                if API.get(f"{address}/health", timeout=2).status_code == 200:
                    break
            time.sleep(0.3)
        yield address
    finally:
        end(server)


def test_mlflow_opens_among_model_training_with_the_rewards_curve_first(
    browser: Browser, finished: Finished, mlflow_pages: str
) -> None:
    # The assistant's panel, which opens at the first visit, would hide a quarter of the page.
    key = "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1"
    browser.page.add_init_script(f"localStorage.setItem('{key}', 'true')")
    client = MlflowClient(finished.tracking_uri)
    (experiment,) = client.search_experiments(filter_string="name = 'refrain'")
    (page,) = client.search_runs([experiment.experiment_id])
    address = f"{mlflow_pages}/#/experiments/{experiment.experiment_id}"
    shown = browser.open(f"{address}/runs/{page.info.run_id}{CURVES}", "reward")
    drawn = re.findall(rf"{page.info.run_name} \((.+)\)", shown)  # charts in their order
    assert drawn[0] == "Overview/reward" and "advantage/max" in drawn
    browser.picture("mlflow-curves")
    shown = browser.open(f"{address}/runs?workflowType=machine_learning", page.info.run_name)
    assert "chain_sum" in shown
    version = f"{mlflow_pages}/#/models/tiny/versions/1?workflowType=machine_learning"
    shown = browser.open(version, "refrain.digest")
    for text in ("refrain.device_hours", "refrain.money", "refrain.step"):
        assert text in shown
    assert [one for one in browser.errors if not any(own in one for own in MLFLOWS_OWN)] == []
