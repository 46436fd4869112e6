"""A run that was stopped: what its page says, and the form of the deployment `resume`."""

from __future__ import annotations

import json
import re
from urllib.parse import unquote

import pytest

from storage.objects.store import Store
from storage.runs.commit_log import head
from storage.runs.run_store import RunStore
from tests.deploy.conftest import API, Platform
from tests.deploy.test_attempts import set_state, steps_of
from tests.deploy.test_deployment import wait_for_a_step

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TYPED = "alpha sweep, third try"


def notes(platform: Platform, flow_run: str) -> dict[str, str]:
    """Markdown of a flow run's artifacts, by the last part of their keys."""
    mine = {"artifacts": {"flow_run_id": {"any_": [flow_run]}, "type": {"any_": ["markdown"]}}}
    found = API.post(f"{platform.api}/artifacts/filter", json=mine).json()
    return {one["key"].rpartition("-")[2]: one["data"] for one in found}


def test_a_stopped_run_goes_on_by_the_form_that_its_page_links_to(platform: Platform) -> None:
    done = platform.deploy("resume")
    assert done.returncode == 0, done.stderr
    there = API.get(f"{platform.api}/deployments/name/resume/resume").raise_for_status().json()
    store = Store(f"file://{platform.home}/stopped")
    config = platform.config("tiny", **{"store.uri": store.uri, "steps": 30})
    first = platform.submit("tiny", config, name=TYPED).json()["id"]
    wait_for_a_step(platform, first)
    (run,) = store.children()
    shown = platform.flow_run(first)
    assert shown["name"] == TYPED and run in shown["tags"]
    set_state(platform, first, type="CANCELLING")
    platform.wait(first, "CANCELLED", timeout=60)
    before = head(RunStore(store, run)) or 0

    for name in ("run", "stopped"):
        page = notes(platform, first)[name]
        assert "**Retry** on this page" in page
        assert f"refrain grpo --resume {run} store.uri={store.uri}" in page
        link = re.search(r"\]\((http[^)]+)\)", page)
        assert link is not None
        address, _, asked = link[1].partition("?parameters=")
        assert address == f"{platform.dashboard}/deployments/deployment/{there['id']}/run"
        form = json.loads(unquote(unquote(asked)))
        assert form == {"config": {"run": run, "store": {"uri": store.uri, "options": {}}}}
    assert f"has stopped after step {before} of 30" in notes(platform, first)["stopped"]

    def submitted(**changes: object) -> dict[str, object]:
        body = {"parameters": {"config": {**form["config"], **changes}}}
        url = f"{platform.api}/deployments/{there['id']}/create_flow_run"
        return API.post(url, json={**body, "state": {"type": "SCHEDULED"}}).json()

    assert "'run' is a required property" in str(
        API.post(
            f"{platform.api}/deployments/{there['id']}/create_flow_run",
            json={"parameters": {"config": {}}, "state": {"type": "SCHEDULED"}},
        ).json()
    )
    refused = submitted(settings=["seed=9"])
    failed = platform.wait(str(refused["id"]), "FAILED")
    assert "was made with other values of seed" in failed["state"]["message"]

    second = str(submitted(steps=before + 2)["id"])
    ended = platform.wait(second, "COMPLETED")
    assert ended["name"] == run  # nobody typed one
    assert list(store.children()) == [run]
    assert head(RunStore(store, run)) == before + 2
    made = [name for name, state in steps_of(platform, second) if state == "COMPLETED"]
    assert made == [f"step {before + 1}", f"step {before + 2}"]
    assert "stopped" not in notes(platform, second)
