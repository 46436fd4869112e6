"""The error of a step is the cause, not Prefect's word on the tasks that waited for it."""

from __future__ import annotations

import pytest
from prefect import flow, task
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)

from tasks.results import result_of
from tests.flows.conftest import prefect_api

__all__ = ["prefect_api"]  # a fixture


@task
def breaks() -> int:
    raise RuntimeError("the cause")


@task
def adds(number: int) -> int:
    return number + 1


@flow
def step(broken: bool) -> int:
    first = breaks.submit() if broken else adds.submit(1)
    other = adds.submit(5)
    waits = adds.submit(other, wait_for=[first])
    last = adds.submit(waits)
    return result_of(last, other, waits, None, first)


@pytest.mark.cluster
def test_the_first_failure_is_raised_whatever_waited_for_it(prefect_api: str) -> None:
    with temporary_settings({PREFECT_API_URL: prefect_api, PREFECT_LOGGING_TO_API_ENABLED: False}):
        assert step(False) == 8
        with pytest.raises(RuntimeError, match="the cause"):
            step(True)
