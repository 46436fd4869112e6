"""Which failures Prefect tries again: those of the infrastructure, and no others."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypedDict

from prefect import Task
from prefect.cache_policies import NO_CACHE, CachePolicy
from prefect.client.schemas.objects import TaskRun
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger
from prefect.states import State

from engines.failures import InfrastructureError
from engines.workers.pool import Assignment
from storage.objects.errors import StoreUnavailable
from tasks.run.attempts import Attempt
from tasks.run.events import AttemptBegan, AttemptEnded, AttemptFailed

if TYPE_CHECKING:
    from tasks.run.run_view import AttemptsView

ATTEMPTS = 4
AGAIN = re.compile(r" \(attempt \d+\)$")  # in the name of a task run that was tried again
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
        # The dashboard's bars have names alone; the server takes this one with the next state.
        task_run.name = f"{AGAIN.sub('', task_run.name)} (attempt {task_run.run_count + 1})"
        logger.warning("Attempt %d failed and is tried again: %s", task_run.run_count, cause)
    elif again:
        logger.error("Attempt %d failed, and it was the last: %s", task_run.run_count, cause)
    return again


def backoff(attempt: int) -> float:
    """Seconds between a failed attempt, counted from 1, and the next."""
    return float(2 ** (attempt - 1))


# Reuse of finished work is the store's (markers), so Prefect keeps neither cache nor results.
OPTIONS = TaskOptions(
    retries=ATTEMPTS - 1,
    retry_delay_seconds=[backoff(attempt) for attempt in range(1, ATTEMPTS)],
    retry_condition_fn=infrastructure_only,
    cache_policy=NO_CACHE,
    persist_result=False,
)


@contextlib.contextmanager
def attempted(
    run: AttemptsView, step: int, stage: str, shard: int | None = None
) -> Iterator[Attempt]:
    """Record an attempt in the run, and in the task's log: worker, attempt, duration, cause."""
    context = TaskRunContext.get()
    number = 1 if context is None else context.task_run.run_count
    attempt = Attempt(
        step=step,
        stage=stage,
        shard=shard,
        number=number,
        started=time.time(),
        assignment=Assignment(time=run.device_time),
    )
    run.tell(AttemptBegan(attempt=attempt))
    try:
        yield attempt
    except Exception as error:
        attempt.error = f"{type(error).__name__}: {error}"
        run.tell(AttemptFailed(attempt=attempt))
        raise
    finally:
        attempt.ended = time.time()
        run.tell(AttemptEnded(attempt=attempt))
        run.attempts.add(attempt)
        attempt.log()
