"""Which failures Prefect tries again: those of the infrastructure, and no others."""

from __future__ import annotations

from typing import Any, TypedDict

from prefect import Task
from prefect.cache_policies import NO_CACHE, CachePolicy
from prefect.client.schemas.objects import TaskRun
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger
from prefect.states import State
from prefect.tasks import exponential_backoff

from engines.cluster import InfrastructureError
from storage.store import StoreUnavailable

ATTEMPTS = 4
RETRYABLE = (InfrastructureError, StoreUnavailable)


class TaskOptions(TypedDict):
    """Arguments that every engine-driving task hands to `prefect.task`."""

    retries: int
    retry_delay_seconds: Any
    retry_condition_fn: Any
    cache_policy: CachePolicy
    persist_result: bool


def infrastructure_only(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Whether a failed attempt is tried again; writes the cause to the task's log."""
    cause = state.result(raise_on_failure=False)
    again = isinstance(cause, RETRYABLE)
    logger = get_run_logger()
    if again and task_run.run_count < ATTEMPTS:
        logger.warning("Attempt %d failed and is tried again: %s", task_run.run_count, cause)
    elif again:
        logger.error("Attempt %d failed, and it was the last: %s", task_run.run_count, cause)
    return again


# Reuse of finished work is the store's (markers), so Prefect keeps neither cache nor results.
OPTIONS = TaskOptions(
    retries=ATTEMPTS - 1,
    retry_delay_seconds=exponential_backoff(backoff_factor=1),
    retry_condition_fn=infrastructure_only,
    cache_policy=NO_CACHE,
    persist_result=False,
)


def attempt_number() -> int:
    """Which attempt of the current task this is; the first is 1."""
    return TaskRunContext.get().task_run.run_count  # type: ignore[union-attr]
