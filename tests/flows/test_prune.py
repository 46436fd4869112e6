"""Old flow runs are removed from a real Prefect server, with what belongs to them, and no others."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import pytest
from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from configs.pruning import PruneConfig
from tasks.launch.pruning import prune
from tests.flows.conftest import settings_for


@pytest.fixture
def client(prefect_api: str) -> Iterator[SyncPrefectClient]:
    own = settings_for(prefect_api)
    with (
        temporary_settings(
            {
                PREFECT_API_URL: own["PREFECT_API_URL"],
                PREFECT_API_AUTH_STRING: own["PREFECT_API_AUTH_STRING"],
            }
        ),
        get_client(sync_client=True) as found,
    ):
        yield found


def names(client: SyncPrefectClient) -> list[str]:
    return sorted(run.name for run in client.read_flow_runs())


def test_what_ended_long_ago_goes_with_all_that_is_its(client: SyncPrefectClient) -> None:
    @task
    def shard() -> None:
        create_markdown_artifact(markdown="# lineage", key="pruned-lineage")

    @flow(name="pruned-step", flow_run_name="step")
    def step() -> None:
        shard()
        create_markdown_artifact(markdown="# note", key="pruned-note")

    @flow(name="pruned", flow_run_name="run")
    def run() -> None:
        step()

    @flow(name="others", flow_run_name="of another team")
    def others() -> None:
        shard()

    before = names(client)
    run()
    others()
    ours = PruneConfig(days=1.0, flows=("pruned", "pruned-step"))
    now = datetime.datetime.now(datetime.UTC)
    kept = prune(client, ours, now)
    assert (kept.flow_runs, kept.artifacts) == (0, 0), "they ended a moment ago"
    assert names(client) == sorted([*before, "run", "step", "of another team"])
    done = prune(client, ours, now + datetime.timedelta(days=1, minutes=1))
    assert (done.flow_runs, done.artifacts) == (2, 2)
    assert names(client) == sorted([*before, "of another team"])
    left = [one for one in client.read_artifacts() if str(one.key).startswith("pruned")]
    assert len(left) == 1, "that of the other team's task"
    assert prune(client, ours, now + datetime.timedelta(days=2)).flow_runs == 0
