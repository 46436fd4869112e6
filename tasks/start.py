"""The tasks that start a run: engines on their workers, and the first weights in them."""

from __future__ import annotations

import os

from prefect import task
from prefect.settings import PREFECT_API_URL

from engines.processes.process_setup import seldom_collected
from storage.runs.commit_log import version_weights
from storage.runs.live import Live, write_live
from storage.runs.opponents import recorded_opponent
from storage.runs.weights import WeightsRef
from tasks.results import Synced
from tasks.run.events import EnginesReady
from tasks.run.flow_options import result_of
from tasks.run.flow_run import flow_run_id
from tasks.run.roles import OPPONENT
from tasks.run.run import Run
from tasks.run.run_log import folder_of
from tasks.run.stage import OPTIONS, attempted
from tasks.weight_sync import publish_and_sync


@task(name="start workers", task_run_name="start workers", **OPTIONS)
def start_workers(run: Run) -> dict[str, list[str]]:
    """Wait for the workers of every pool; returns pool -> worker names."""
    workers = run.engines.workers()
    announce(run)
    return workers


def announce(run: Run) -> None:
    """Tell those who look at the run from outside where it goes on."""
    flow = flow_run_id()
    certificates = run.engines.temporary_certificates
    live = Live(
        scheduler=run.engines.scheduler,
        prefect=PREFECT_API_URL.value(),
        flow_run=None if flow is None else str(flow),
        epoch=run.epoch,
        certificates=None if certificates is None else certificates.model_dump(),
        host=os.uname().nodename,
        logs=str(folder_of(run.name)),
        worker_logs=run.engines.worker_logs,
    )
    write_live(run.files, live)


@task(name="start engine", task_run_name="start {role}", **OPTIONS)
def start_engine(run: Run, role: str, workers: dict[str, list[str]]) -> str:
    """Wait until the engines of a role stand; they were begun when the run was opened."""
    run.engines.wait(role)
    return role


@task(name="weight_sync", task_run_name="weight_sync {version}", **OPTIONS)
def first_sync(run: Run, version: int, started: list[str]) -> Synced:
    """Bring the version that the run begins with to the engines that sample."""
    return publish_and_sync(run, version, version)


@task(name="weight_sync", task_run_name="weight_sync opponent", **OPTIONS)
def sync_opponents(run: Run, first: Synced) -> WeightsRef:
    """Bring the frozen version that plays against the policy to its engines, once."""
    weights = frozen_weights(run, first.weights)
    with (
        attempted(run, run.head, "weight_sync") as attempt,
        run.engines.holding(attempt.assignment, "opponent"),
    ):
        run.engines[OPPONENT].sync(weights, probe=None)
    return weights


def frozen_weights(run: Run, first: WeightsRef) -> WeightsRef:
    """The opponent's version; first: that with which the run goes on."""
    recorded = recorded_opponent(run.files)
    if recorded is not None:
        return recorded.weights
    return first if run.head == run.start else version_weights(run.files, run.start)


def start_engines(run: Run) -> Synced:
    """Start every role's engines and give those that sample their weights."""
    workers = start_workers.submit(run)
    started = [
        start_engine.submit(run, role, workers)  # type: ignore[call-overload]
        for role in run.engines.starting
    ]
    synced = first_sync.submit(run, run.head, started)
    first = result_of(synced)
    if run.config.opponent is not None:
        result_of(sync_opponents.submit(run, first))
    last = run.last
    run.tell(EnginesReady(last=last, snapshot=last is not None and run.clock.snapshot_after(last)))
    seldom_collected()
    return first
