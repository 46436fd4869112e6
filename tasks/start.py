"""The tasks that start a run: engines on their workers, and the first weights in them."""

from __future__ import annotations

from prefect import task

from tasks.results import Synced, result_of
from tasks.run.retries import OPTIONS
from tasks.run.run import Run
from tasks.weight_sync import publish_and_sync


@task(name="start workers", task_run_name="start workers", **OPTIONS)
def start_workers(run: Run) -> dict[str, list[str]]:
    """Wait for the workers of every pool; returns pool -> worker names."""
    workers = run.engines.workers()
    run.announce()
    return workers


@task(name="start engine", task_run_name="start {role}", **OPTIONS)
def start_engine(run: Run, role: str, workers: dict[str, list[str]]) -> str:
    """Wait until the engines of a role stand; they were begun when the run was opened."""
    run.engines.wait(role)
    return role


@task(name="weight_sync", task_run_name="weight_sync {version}", **OPTIONS)
def first_sync(run: Run, version: int, started: list[str]) -> Synced:
    """Bring the version that the run begins with to the engines that sample."""
    return publish_and_sync(run, version, version)


def start_engines(run: Run) -> Synced:
    """Start every role's engines and give the rollout engines their weights."""
    run.tracker.start()
    workers = start_workers.submit(run)
    started = [
        start_engine.submit(run, role, workers)  # type: ignore[call-overload]
        for role in run.engines.roles
    ]
    synced = first_sync.submit(run, run.head, started)
    return result_of(synced, workers, *started)
