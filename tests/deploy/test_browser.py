"""The dashboard in a headless browser: form, graph and artifacts of a finished run, no error.

With REFRAIN_SCREENSHOTS=FOLDER the pictures of docs/dashboard.md are written there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.conftest import API, Platform

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


SUITE = {
    "source": {"kind": "reasoning_gym", "task": "chain_sum", "size": 12, "seed": 5},
    "samples": 4,
    "greedy": False,
    "pass_at": [1, 4],
    "right_from": 0.2,
}


class Browser:
    """A page, and what its console complained of."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("console", lambda said: self._say(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self._say(str(error)))
        page.on("response", lambda got: self._say(got.url) if got.status >= 400 else None)

    def _say(self, text: str) -> None:
        self.errors.append(text)

    def open(self, address: str, *texts: str) -> str:
        """Open a page and wait until it shows the texts; returns all that it shows."""
        self.page.goto(address)
        for text in texts:
            self.page.get_by_text(text).first.wait_for(timeout=30_000)
        self.page.wait_for_timeout(2500)  # the graph is drawn after its data have come
        shown: str = self.page.inner_text("body")
        return shown

    def picture(self, name: str, height: int = 900) -> None:
        folder = os.environ.get("REFRAIN_SCREENSHOTS")
        if folder is not None:
            self.page.set_viewport_size({"width": 1300, "height": height})
            self.page.wait_for_timeout(1000)
            self.page.screenshot(path=str(Path(folder, f"{name}.png")))


@pytest.fixture
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra browser")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no browser is installed (apt install chromium)")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        yield Browser(started.new_page(viewport={"width": 1300, "height": 900}))
        with suppress(playwright.Error):
            started.close()


def test_a_finished_run_and_the_form_show_without_an_error(
    platform: Platform, browser: Browser
) -> None:
    changes: dict[str, Any] = {"steps": 3, "evaluation": {"suites": {"sums": SUITE}}}
    changes |= {f"cluster.pools.{pool}.price_per_hour": 2.5 for pool in ("train", "rollout")}
    run = platform.submit("tiny", platform.config("tiny", **changes)).json()["id"]
    platform.wait(run, "COMPLETED")
    board = platform.dashboard
    steps = API.post(
        f"{platform.api}/flow_runs/filter",
        json={"flow_runs": {"parent_flow_run_id": {"any_": [run]}}, "sort": "START_TIME_ASC"},
    ).json()
    artifacts = {
        one["key"].rpartition("-")[2]: one["id"]
        for one in API.post(f"{platform.api}/artifacts/filter", json={}).json()
    }

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
    for text in ("48 samples", "pass@4", "bootstrap", "device-hours", "--evaluation sums@3"):
        assert text in shown
    browser.picture("evaluation", 760)
    browser.open(f"{board}/artifacts/artifact/{artifacts['curves']}", "Reward, KL and time")
    width = browser.page.evaluate("() => document.querySelector('img[src^=data]').naturalWidth")
    assert width > 500
    browser.picture("curves", 1000)
    shown = browser.open(f"{board}/artifacts/artifact/{artifacts['run']}", "Flow process")
    assert "Store" in shown and "MLflow" in shown
    browser.picture("note", 700)
    assert browser.errors == []
