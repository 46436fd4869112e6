"""Later attempts of a deployment's flow run: Retry, Prefect's own retries, a crash."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from storage.objects.store import Store
from tests.deploy.conftest import API, Platform
from tests.deploy.test_deployment import wait_for_a_step
from tests.flows.test_flow_retries import FLOWS

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS = [f"step {step}" for step in range(1, 7)]


def committed_steps(run: Path) -> dict[str, bytes]:
    """Commits by step."""
    return {path.parent.name: path.read_bytes() for path in run.glob("steps/*/commit.json")}


def set_state(platform: Platform, flow_run: str, **state: str) -> None:
    url = f"{platform.api}/flow_runs/{flow_run}/set_state"
    API.post(url, json={"state": state}).raise_for_status()


def steps_of(platform: Platform, flow_run: str) -> list[tuple[str, str]]:
    """Names and states of the flow runs below one, as they began."""
    mine = {"flow_runs": {"parent_flow_run_id": {"any_": [flow_run]}}, "sort": "START_TIME_ASC"}
    found: list[dict[str, Any]] = API.post(f"{platform.api}/flow_runs/filter", json=mine).json()
    return [(one["name"], one["state_type"]) for one in found]


def each_step_has_a_bar(ended: list[tuple[str, str]], before: dict[str, bytes]) -> None:
    """Steps that a later attempt made have ended well, each once; `before`: commits of the first.

    The first one may have been ended between a step's commit and the end of its bar.
    """
    done = [name for name, state in ended if state == "COMPLETED"]
    assert len(done) == len({*done}) and {name for name, _ in ended} == {*STEPS}, ended
    assert {*done} >= {*STEPS} - {f"step {int(step)}" for step in before}, ended


def test_retry_on_the_page_goes_on_with_the_run(platform: Platform) -> None:
    """Cancelled after a step and tried again: one run, each step made once, a bar for each."""
    store = Store(f"file://{platform.home}/retried")
    config = platform.config("tiny", **{"store.uri": store.uri, "steps": 6})
    flow_run = platform.submit("tiny", config).json()["id"]
    wait_for_a_step(platform, flow_run)
    set_state(platform, flow_run, type="CANCELLING")
    platform.wait(flow_run, "CANCELLED", timeout=60)
    (name,) = store.children()
    before = committed_steps(platform.home / "retried" / name)
    assert 0 < len(before) < 6

    set_state(
        platform, flow_run, type="SCHEDULED", name="AwaitingRetry", message="Retry from the UI"
    )
    platform.wait(flow_run, "COMPLETED")
    assert list(store.children()) == [name]
    after = committed_steps(platform.home / "retried" / name)
    assert len(after) == 6
    assert {step: after[step] for step in before} == before
    ended = steps_of(platform, flow_run)
    each_step_has_a_bar(ended, before)


def test_a_run_that_crashed_and_is_started_again_goes_on(platform: Platform) -> None:
    """Its process is killed, and the same flow run is scheduled anew, as an automation does."""
    store = Store(f"file://{platform.home}/crashed")
    config = platform.config("tiny", **{"store.uri": store.uri, "steps": 6})
    flow_run = platform.submit("tiny", config).json()["id"]
    wait_for_a_step(platform, flow_run)
    (name,) = store.children()
    flow = process_of(platform)
    flow.send_signal(signal.SIGKILL)
    platform.wait(flow_run, "CRASHED")
    before = committed_steps(platform.home / "crashed" / name)
    assert 0 < len(before) < 6

    set_state(platform, flow_run, type="SCHEDULED")
    platform.wait(flow_run, "COMPLETED")
    assert list(store.children()) == [name]
    after = committed_steps(platform.home / "crashed" / name)
    assert len(after) == 6
    assert {step: after[step] for step in before} == before
    ended = steps_of(platform, flow_run)
    each_step_has_a_bar(ended, before)
    assert {state for _, state in ended} <= {"COMPLETED", "CRASHED"}, "one is left running"

    # Once more, though nothing is left to do: it is not refused, and no step is made.
    set_state(platform, flow_run, type="SCHEDULED")
    platform.wait_until(flow_run, lambda found: "earlier attempt" in str(found["state"]["message"]))
    assert committed_steps(platform.home / "crashed" / name) == after


def process_of(platform: Platform) -> psutil.Process:
    """The process of the only flow that the worker has under way."""
    assert platform.worker is not None
    children = psutil.Process(platform.worker.pid).children(recursive=True)
    (found,) = (one for one in children if "prefect.engine" in one.cmdline() or is_flow(one))
    return found


def is_flow(process: psutil.Process) -> bool:
    return process.cmdline()[1:4] == ["-m", "prefect", "flow-run"]


@pytest.mark.parametrize("tries", ["own", "with_options"])
def test_prefects_own_retries_go_on_with_the_run(platform: Platform, tries: str) -> None:
    for path in FLOWS:
        shutil.copy(path, platform.home)
    (platform.home / "failed").unlink(missing_ok=True)
    flow = "my_retried_flow:retried"
    if tries == "with_options":
        flow = "my_options:optional"
        (platform.home / "my_options.py").write_text(
            "from my_retried_flow import retried\n"
            "optional = retried.with_options(name='optional', retries=2)\n"
        )
    done = platform.deploy("--flow", flow, "--recipe", "tiny", f"name={tries}", "steps=4")
    assert done.returncode == 0, done.stderr
    name = f"{flow.partition(':')[2]}/{tries}"
    found = API.get(f"{platform.api}/deployments/name/{name}").raise_for_status().json()
    where = {"uri": f"file://{platform.home}/{tries}"}
    config = {**found["parameters"]["config"], "store": where}
    submitted = API.post(
        f"{platform.api}/deployments/{found['id']}/create_flow_run",
        json={"parameters": {"config": config}, "state": {"type": "SCHEDULED"}},
    )
    flow_run = submitted.json()["id"]
    done_run = platform.wait(flow_run, "COMPLETED")
    (run,) = Store(where["uri"]).children()
    assert done_run["name"] == run
    assert len(committed_steps(platform.home / tries / run)) == 4
    ended = steps_of(platform, flow_run)
    assert [name for name, state in ended if state == "COMPLETED"] == STEPS[:4], ended
    assert ("step 3", "FAILED") in ended
