"""Removing old flow runs from a Prefect server, by its API, with all that belongs to them.

The server's own service (PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED) can be set by whoever starts the
server alone, and takes top-level flow runs of all its flows: a step goes in the round after its run.
Events the server removes by itself, after PREFECT_SERVER_EVENTS_RETENTION_PERIOD (7 days).
"""

from __future__ import annotations

import contextlib
import datetime
from dataclasses import dataclass

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun
from prefect.exceptions import ObjectNotFound

from configs.pruning import PruneConfig

AT_ONCE = 100  # flow runs that are asked for together
ARTIFACTS_AT_ONCE = 200  # the server's own limit for an answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """What was removed."""

    flow_runs: int  # with their task runs, states and logs
    artifacts: int


def prune(client: SyncPrefectClient, config: PruneConfig, now: datetime.datetime) -> Pruned:
    """Remove the flow runs that the settings name; it may be stopped and done again.

    Artifacts go first: a server forgets whose they are with their flow run.
    """
    before = now - datetime.timedelta(days=config.days)
    runs = artifacts = 0
    while flow_runs := _ended(client, config, before):
        ids = [run.id for run in flow_runs]
        artifacts += _without_artifacts(client, FlowRunFilter(id=FlowRunFilterId(any_=ids)))
        for run in flow_runs:
            with contextlib.suppress(ObjectNotFound):  # another has removed it
                client.delete_flow_run(run.id)
                runs += 1
    return Pruned(flow_runs=runs, artifacts=artifacts)


def _ended(
    client: SyncPrefectClient, config: PruneConfig, before: datetime.datetime
) -> list[FlowRun]:
    over = FlowRunFilterState(type=FlowRunFilterStateType(any_=sorted(TERMINAL_STATES)))
    return client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=list(config.flows))),
        flow_run_filter=FlowRunFilter(
            state=over, end_time=FlowRunFilterEndTime.model_validate({"before_": before})
        ),
        limit=AT_ONCE,
    )


def _without_artifacts(client: SyncPrefectClient, runs: FlowRunFilter) -> int:
    """Remove the artifacts of some flow runs; returns how many."""
    count = 0
    while artifacts := client.read_artifacts(
        artifact_filter=ArtifactFilter(), flow_run_filter=runs, limit=ARTIFACTS_AT_ONCE
    ):
        for artifact in artifacts:
            with contextlib.suppress(ObjectNotFound):
                client.delete_artifact(artifact.id)
                count += 1
    return count
