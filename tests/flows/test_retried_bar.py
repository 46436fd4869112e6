"""A task run that is tried again says so on the dashboard, where its bar has its name alone."""

from __future__ import annotations

import httpx
from prefect import flow, task
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from engines.failures import WorkerLost
from tasks.run.stage import OPTIONS
from tests.flows.conftest import settings_for


def test_the_name_on_the_server_says_which_attempt_it_is(prefect_api: str) -> None:
    options = {**OPTIONS, "retry_delay_seconds": 0.1}
    tries = []

    @task(task_run_name="rollout {shards}", **options)
    def rollout(shards: str) -> None:
        tries.append(shards)
        if tries.count(shards) < (3 if shards == "1/2" else 1):
            raise WorkerLost("rollout-0", "its process ended")

    @flow(name="retried-bar")
    def step() -> None:
        for future in [rollout.submit("1/2"), rollout.submit("2/2")]:
            future.result()

    own = settings_for(prefect_api)
    with temporary_settings(
        {
            PREFECT_API_URL: own["PREFECT_API_URL"],
            PREFECT_API_AUTH_STRING: own["PREFECT_API_AUTH_STRING"],
        }
    ):
        step()
    asked = {"flows": {"name": {"any_": ["retried-bar"]}}}
    for _ in range(100):
        answer = httpx.post(f"{prefect_api}/task_runs/filter", json=asked, timeout=30)
        found = {one["name"]: one for one in answer.raise_for_status().json()}
        if {one["state_name"] for one in found.values()} == {"Completed"} and len(found) == 2:
            break
    assert sorted(found) == ["rollout 1/2 (attempt 3)", "rollout 2/2"]
    assert found["rollout 1/2 (attempt 3)"]["run_count"] == 3
