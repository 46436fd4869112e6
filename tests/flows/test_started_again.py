"""A flow run whose process was killed, started again, and its run resumed by the flow `resume`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from storage.objects.store import Store
from storage.runs.commit_log import head
from storage.runs.run_store import RunStore
from tests.flows.conftest import ROOT, settings_for

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

TYPED = "my own name"


class Server:
    """Prefect's, by its API."""

    def __init__(self, api: str) -> None:
        self.api = api

    def ask(self, place: str, body: dict[str, Any]) -> Any:
        return httpx.post(f"{self.api}/{place}", json=body, timeout=60).raise_for_status().json()

    def flow_run(self, flow: str, config: dict[str, Any], name: str | None = None) -> str:
        """A new flow run, pending; its id."""
        known = self.ask("flows/", {"name": flow})["id"]
        body: dict[str, Any] = {"flow_id": known, "parameters": {"config": config}}
        body |= {"state": {"type": "PENDING"}} | ({} if name is None else {"name": name})
        return str(self.ask("flow_runs/", body)["id"])

    def read(self, flow_run: str) -> dict[str, Any]:
        found = httpx.get(f"{self.api}/flow_runs/{flow_run}", timeout=60)
        return dict(found.raise_for_status().json())

    def steps(self, flow_run: str) -> list[tuple[str, str]]:
        """Names and states of the flow runs below it, as they began."""
        mine = {"flow_runs": {"parent_flow_run_id": {"any_": [flow_run]}}, "sort": "START_TIME_ASC"}
        found = self.ask("flow_runs/filter", mine)
        return [(one["name"], one["state_type"]) for one in found]

    def notes(self, flow_run: str) -> dict[str, str]:
        """Markdown of its artifacts, by the last part of their keys."""
        mine = {"artifacts": {"flow_run_id": {"any_": [flow_run]}, "type": {"any_": ["markdown"]}}}
        found = self.ask("artifacts/filter", mine)
        return {one["key"].rpartition("-")[2]: one["data"] for one in found}


def worker(folder: Path, api: str, flow_run: str, flow: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.flows.as_a_worker", flow_run, flow],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **settings_for(api)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_flow_run_that_was_killed_goes_on_and_so_does_its_run(
    prefect_api: str, tmp_path: Path
) -> None:
    server, store = Server(prefect_api), Store(f"file://{tmp_path}/store")
    recipe = load_recipe(GRPOConfig, "tiny", [f"store.uri={store.uri}", "steps=4"])
    flow_run = server.flow_run("grpo", recipe.model_dump(mode="json"), TYPED)
    first = worker(tmp_path, prefect_api, flow_run, "flows.grpo:grpo")
    while not any((head(RunStore(store, name)) or 0) >= 2 for name in store.children()):
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    (name,) = store.children()
    files = RunStore(store, name)
    made = head(files) or 0
    assert 2 <= made < 4
    assert server.read(flow_run)["state_type"] == "RUNNING"  # nobody has told the server
    page = server.notes(flow_run)["run"]
    assert f"refrain grpo --resume {name} store.uri={store.uri}" in page

    again = worker(tmp_path, prefect_api, flow_run, "flows.grpo:grpo")
    out = again.communicate(timeout=800)[0]
    assert again.returncode == 0, out
    assert list(store.children()) == [name]
    assert head(files) == 4
    shown = server.read(flow_run)
    assert (shown["state_type"], shown["name"]) == ("COMPLETED", TYPED)
    assert name in shown["tags"]
    steps = server.steps(flow_run)
    done = [step for step, state in steps if state == "COMPLETED"]
    assert set(done) <= {f"step {step}" for step in range(1, 5)} and len(done) == len(set(done))
    assert [f"step {step}" for step in range(made + 1, 5)] == done[-(4 - made) :]
    assert {state for _, state in steps} <= {"COMPLETED", "CRASHED"}, "one is left running"

    where = {"run": name, "steps": 5, "store": {"uri": store.uri}}
    resumed = server.flow_run("resume", where)
    last = worker(tmp_path, prefect_api, resumed, "flows.resume:resume")
    out = last.communicate(timeout=800)[0]
    assert last.returncode == 0, out
    assert head(files) == 5 and list(store.children()) == [name]
    shown = server.read(resumed)
    assert (shown["state_type"], shown["name"]) == ("COMPLETED", name)
    assert server.steps(resumed) == [("step 5", "COMPLETED")]
