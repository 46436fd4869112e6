"""Alerts on a real server: each fires for its events, for the run that they are about."""

from __future__ import annotations

import datetime
import time
import uuid
from pathlib import Path

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.launch.registration import AUTOMATIONS_FILE, register_automations
from tests.deploy.conftest import API, Platform

pytestmark = pytest.mark.cluster


def send(platform: Platform, event: str, run: str, times: int = 1) -> None:
    """Events as a run sends them."""
    resource = {"prefect.resource.id": f"refrain.run.{run}", "prefect.resource.name": run}
    events = [
        {
            "id": str(uuid.uuid4()),
            "event": event,
            "occurred": datetime.datetime.now(datetime.UTC).isoformat(),
            "resource": resource,
            "payload": {},
        }
        for _ in range(times)
    ]
    API.post(f"{platform.api}/events", json=events).raise_for_status()


def fired(platform: Platform, name: str) -> int:
    """How often an automation was triggered."""
    found = API.post(
        f"{platform.api}/events/filter",
        json={"filter": {"event": {"name": ["prefect.automation.triggered"]}}, "limit": 50},
    ).json()["events"]
    return sum(one["resource"].get("prefect.resource.name") == name for one in found)


def wait_until_fired(platform: Platform, name: str, times: int = 1, timeout: float = 40) -> None:
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if fired(platform, name) >= times:
            return
        time.sleep(0.5)
    raise AssertionError(f"{name} was not triggered; {platform.log('server.log')}")


@pytest.mark.slow
def test_a_guard_and_repeated_retries_fire(platform: Platform) -> None:
    send(platform, "refrain.attempt.failed", "flaky", times=4)
    send(platform, "refrain.attempt.failed", "other", times=4)
    send(platform, "refrain.guard.not-finite", "diverging")
    wait_until_fired(platform, "refrain: a guard was hit")
    assert fired(platform, "refrain: repeated retries") == 0
    send(platform, "refrain.attempt.failed", "flaky")
    wait_until_fired(platform, "refrain: repeated retries")
    assert fired(platform, "refrain: repeated retries") == 1


@pytest.mark.slow
def test_a_stalled_run_fires_and_a_finished_one_does_not(
    platform: Platform, tmp_path: Path
) -> None:
    declared = yaml.safe_load(AUTOMATIONS_FILE.read_text())["automations"]
    (stalled,) = [one for one in declared if one["name"] == "refrain: a run has stalled"]
    stalled["trigger"]["within"] = 10  # the least that Prefect allows
    file = tmp_path / "automations.yaml"
    file.write_text(yaml.safe_dump({"automations": [stalled]}))
    with temporary_settings({PREFECT_API_URL: platform.api}):
        assert register_automations(path=file) == [stalled["name"]]
    time.sleep(2)  # the server's triggers learn of the change
    send(platform, "refrain.run.started", "hanging")
    send(platform, "refrain.run.started", "done")
    time.sleep(2)  # Prefect keeps no order among events of the same moment
    send(platform, "refrain.run.ended", "done")
    wait_until_fired(platform, stalled["name"])
    time.sleep(5)
    assert fired(platform, stalled["name"]) == 1
