"""Deployments on a real server: registered, refused, run by a worker, scheduled, cancelled."""

from __future__ import annotations

import datetime
import shutil
import time
from typing import Any

import httpx
import psutil
import pytest

from storage.evaluations.results import evaluations_of
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tests.deploy.conftest import API, Platform
from tests.flows.test_own_flow import OWN

pytestmark = pytest.mark.cluster

HALF_AN_HOUR = datetime.timedelta(minutes=30)


@pytest.mark.slow
def test_deploying_again_changes_nothing(platform: Platform) -> None:
    before = platform.deployment("tiny")
    done = platform.deploy("tiny")
    assert done.returncode == 0, done.stderr
    after = platform.deployment("tiny")
    own = (
        "id",
        "name",
        "parameters",
        "schedules",
        "concurrency_options",
        "pull_steps",
        "entrypoint",
    )
    assert {key: after[key] for key in own} == {key: before[key] for key in own}
    assert (
        after["global_concurrency_limit"]["limit"],
        after["concurrency_options"]["collision_strategy"],
    ) == (
        1,
        "ENQUEUE",
    )
    (schedule,) = platform.deployment("nightly")["schedules"]
    assert schedule["active"] is False
    assert schedule["schedule"]["timezone"] == "Europe/Berlin"
    names = [one["name"] for one in API.post(f"{platform.api}/automations/filter", json={}).json()]
    assert len(names) == len(set(names)) == 3


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("steps", 0, "'config.steps'. Failure reason: 0 is less than the minimum of 1"),
        ("model.layers", 0, "'config.model.layers'. Failure reason: 0 is less than the minimum"),
        ("rollout.engine", "vlm", "'config.rollout.engine'. Failure reason: 'vlm' is not one of"),
        ("stepz", 3, "'config'. Failure reason: Additional properties are not allowed ('stepz'"),
        (
            "model.layerz",
            3,
            "'config.model'. Failure reason: Additional properties are not allowed",
        ),
    ],
)
def test_a_bad_value_is_refused_by_the_server(
    platform: Platform, setting: str, value: object, said: str
) -> None:
    answer = platform.submit("tiny", platform.config("tiny", **{setting: value}))
    assert answer.status_code == 409
    assert said in answer.json()["detail"]


@pytest.mark.slow
def test_a_rule_across_fields_fails_the_run_before_any_engine(platform: Platform) -> None:
    config = platform.config("nightly", **{"rollout.shards": 99})
    done = platform.wait(platform.submit("nightly", config).json()["id"], "FAILED")
    assert "rollout.shards = 99 is more than prompts_per_step = 8" in done["state"]["message"]
    assert not (platform.home / "store").exists()


def test_a_run_by_the_api_and_a_cancel(platform: Platform) -> None:
    config = platform.config("tiny", **{"steps": 1000, "store.keep_steps": 2})
    cancel(platform, platform.submit("tiny", config).json()["id"])
    (folder,) = (platform.home / "store").iterdir()
    assert any(folder.glob("steps/*/commit.json"))


@pytest.mark.slow
def test_a_run_by_a_schedule_waits_for_the_one_before(platform: Platform) -> None:
    config = platform.config("tiny", **{"steps": 2, "store.uri": f"file://{platform.home}/first"})
    run = platform.submit("tiny", config).json()["id"]
    scheduled = run_by_schedule(platform)
    done = platform.wait(run, "COMPLETED")
    (folder,) = (platform.home / "first").iterdir()
    assert done["name"] == folder.name
    assert (folder / "steps/000002/commit.json").exists()
    cancel(platform, scheduled)


def cancel(platform: Platform, flow_run: str) -> None:
    """Cancel it on the dashboard once it has made a step: nothing that it started is left."""
    wait_for_a_step(platform, flow_run)
    started = platform.children()
    assert len(started) >= 4
    API.post(
        f"{platform.api}/flow_runs/{flow_run}/set_state",
        json={"state": {"type": "CANCELLING"}},
    ).raise_for_status()
    platform.wait(flow_run, "CANCELLED")  # Prefect's worker looks for hooks first
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []
    assert platform.children() == []


def run_by_schedule(platform: Platform) -> str:
    """A run that a schedule made, soon to begin.

    A server that is writing for another may make runs of a new schedule a minute late (SQLite waits up
    to 60 s for its lock), and the moments until then are not made up for: then the schedule is set anew.
    """
    schedules = f"{platform.api}/deployments/{platform.deployment('tiny')['id']}/schedules"
    long = {"config": platform.config("tiny", **{"steps": 1000, "store.keep_steps": 2})}
    for _ in range(5):
        soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=15)
        schedule = {"interval": 3600, "anchor_date": soon.isoformat()}
        made = API.post(
            schedules, json=[{"schedule": schedule, "active": True, "parameters": long}]
        ).raise_for_status()
        first = first_scheduled(platform)
        if datetime.datetime.fromisoformat(first["expected_start_time"]) - soon < HALF_AN_HOUR:
            return first["id"]
        API.delete(f"{schedules}/{made.json()[0]['id']}").raise_for_status()
    raise AssertionError(platform.log("server.log"))


def first_scheduled(platform: Platform) -> dict[str, Any]:
    """The first of the runs that the schedule made."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        found = API.post(
            f"{platform.api}/flow_runs/filter",
            json={
                "flow_runs": {"tags": {"all_": ["auto-scheduled"]}},
                "sort": "EXPECTED_START_TIME_ASC",
            },
        ).json()
        if found:
            return found[0]
        time.sleep(0.3)
    raise AssertionError(platform.log("server.log"))


def wait_for_a_step(platform: Platform, flow_run: str, timeout: float = 120) -> None:
    """Return when the flow run has a completed step."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        done = API.post(
            f"{platform.api}/flow_runs/filter",
            json={
                "flow_runs": {
                    "parent_flow_run_id": {"any_": [flow_run]},
                    "state": {"type": {"any_": ["COMPLETED"]}},
                }
            },
        ).json()
        if done:
            return
        time.sleep(0.3)
    raise AssertionError(platform.log("worker.log"))


@pytest.mark.slow
def test_a_flow_of_a_users_own_is_deployed_by_its_path(platform: Platform) -> None:
    shutil.copy(OWN, platform.home)
    done = platform.deploy("--flow", "my_flows:my_flow", "--recipe", "tiny", "name=own", "steps=1")
    assert done.returncode == 0, done.stderr
    assert "Deployment   mine/own" in done.stdout
    found = API.get(f"{platform.api}/deployments/name/mine/own").raise_for_status().json()
    assert list(found["parameter_openapi_schema"]["properties"]) == ["config", "resume", "fork"]
    config = {**found["parameters"]["config"], "store": {"uri": f"file://{platform.home}/own"}}
    submitted = API.post(
        f"{platform.api}/deployments/{found['id']}/create_flow_run",
        json={"parameters": {"config": config}, "state": {"type": "SCHEDULED"}},
    )
    platform.wait(submitted.json()["id"], "COMPLETED")
    store = Store(f"file://{platform.home}/own")
    (name,) = store.children()
    record = RunStore(store, name).read_run()
    assert record is not None and record["flow"] == "my_flows:my_flow"


@pytest.mark.slow
def test_a_stored_run_is_evaluated_by_its_form(platform: Platform) -> None:
    done = platform.deploy("evaluate")
    assert done.returncode == 0, done.stderr
    config = platform.config("tiny", name="to-evaluate", steps=1)
    platform.wait(platform.submit("tiny", config).json()["id"], "COMPLETED")
    store = Store(config["store"]["uri"])
    (name,) = (one for one in store.children() if one.startswith("to-evaluate"))
    there = API.get(f"{platform.api}/deployments/name/evaluate/evaluate").raise_for_status().json()
    url = f"{platform.api}/deployments/{there['id']}/create_flow_run"

    def asked(**changes: object) -> httpx.Response:
        form = {**there["parameters"]["config"], "store": {"uri": store.uri}, **changes}
        body = {"parameters": {"config": form}, "state": {"type": "SCHEDULED"}}
        return API.post(url, json=body)

    refused = asked()
    assert refused.status_code == 409 and "'run' is a required property" in refused.text
    short = [
        "evaluation.suites.rg_chain_sum.rows=4",
        "evaluation.suites.rg_chain_sum.max_new_tokens=8",
    ]
    short += ["evaluation.suites.rg_chain_sum.prompt.max_prompt_tokens=200"]
    made = asked(run=name, versions="0,1", settings=short)
    assert made.status_code == 201, made.text
    ended = platform.wait(made.json()["id"], "COMPLETED")
    assert ended["name"] == f"evaluate {name}"
    found = evaluations_of(RunStore(store, name), "rg_chain_sum")
    assert [(one.version, one.asked, one.back_fill) for one in found] == [
        (0, 4, True),
        (1, 4, True),
    ]


@pytest.mark.slow
def test_settings_of_what_takes_no_recipe_arrive(platform: Platform) -> None:
    for words in (["prune", "days=7"], ["resume", "steps=40", "rollout.max_sequences=8"]):
        done = platform.deploy(*words)
        assert done.returncode == 0, done.stderr

    def config(name: str) -> dict[str, Any]:
        found = API.get(f"{platform.api}/deployments/name/{name}/{name}").raise_for_status()
        return dict(found.json()["parameters"]["config"])

    assert config("prune") == {"days": 7}
    assert config("resume") == {"steps": 40, "settings": ["rollout.max_sequences=8"]}
    done = platform.deploy("prune", "dyas=7")
    assert done.returncode == 1
    assert done.stderr == "Deployment prune: dyas: there is no such setting. Did you mean days?\n"


def test_without_a_server_deploying_says_so_in_one_sentence(platform: Platform) -> None:
    gone = Platform(platform.home, port=1)
    done = gone.deploy()
    assert done.returncode == 1
    assert done.stderr.startswith(
        "No Prefect server answers at PREFECT_API_URL = http://127.0.0.1:1"
    )
    assert len(done.stderr.strip().splitlines()) == 1
