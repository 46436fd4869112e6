"""What every flow of a run hands to Prefect's @flow: RUN for the run's, STEP for that of one step.

@flow(name="mine-step", **STEP)
def my_step(run: Run, step: int) -> StepSummary: …
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypedDict, TypeVar

import httpx
from prefect import Task
from prefect.client.base import PrefectResponse
from prefect.client.schemas.objects import RunInput
from prefect.context import AsyncClientContext, FlowRunContext, TagsContext
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.annotations import opaque
from prefect.utilities.asyncutils import run_coro_as_sync

Result = TypeVar("Result")


class TaskThreads(ThreadPoolTaskRunner[Any]):
    """Runs the tasks of a flow run in threads, and knows all of them: see `result_of`."""

    def __init__(self, max_workers: int | None = None) -> None:
        super().__init__(max_workers)
        self.submitted: list[PrefectFuture[Any]] = []

    def submit(
        self,
        task: Task[Any, Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None = None,
        dependencies: dict[str, set[RunInput]] | None = None,
    ) -> PrefectConcurrentFuture[Any]:
        """Start a task; its run does not inherit the tags of its flow run.

        Prefect asks the server for a concurrency slot for each tag of a task run before it starts
        it: a round trip of up to two seconds on a busy machine, measured with Prefect 3.7.7.
        """
        arguments = {name: _closed(value) for name, value in parameters.items()}
        with TagsContext(current_tags=set()):
            future = super().submit(task, arguments, wait_for, dependencies)
        self.submitted.append(future)
        return future


def _closed(value: Any) -> Any:
    """A parameter in whose values Prefect looks for no futures, except in lists, tuples and dicts.

    It walks through all fields of every result that a task is given, some thousands for a step of
    many shards: a third of the flow process's work, measured with Prefect 3.7.7.
    """
    if type(value) is dict:
        return {key: _closed(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_closed(item) for item in value)
    return opaque(value)


class RunOptions(TypedDict):
    """Of the flow of a run."""

    persist_result: bool
    task_runner: TaskThreads


class StepOptions(TypedDict):
    """Of the flow of a step."""

    flow_run_name: str
    retries: int
    validate_parameters: bool
    task_runner: TaskThreads


# Its flow run is named by tasks/run/flow_run.py.
RUN = RunOptions(persist_result=False, task_runner=TaskThreads())
# What is tried again is a task, or the whole run from its last commit: never a step, whatever
# PREFECT_FLOWS_DEFAULT_RETRIES says.
STEP = StepOptions(
    flow_run_name="step {step}", retries=0, validate_parameters=False, task_runner=TaskThreads()
)


def result_of(last: PrefectFuture[Result]) -> Result:
    """The result of the last task of a flow run, or the failure of the first task that failed.

    Prefect's own error would say only that the last one, or another that waited, is not ready.
    """
    context = FlowRunContext.get()
    runner = None if context is None else context.task_runner
    if not isinstance(runner, TaskThreads):
        raise ValueError(
            "The flow does not know its tasks. Declare it by @flow(name=…, **RUN), or a step's by "
            "@flow(name=…, **STEP), from tasks.run.flow_options."
        )
    last.wait()
    for future in runner.submitted:
        future.wait()
        if not future.state.is_pending():
            future.result()
    return last.result()


def forget_results() -> None:
    """Have Prefect forget which state the results of a flow's sub-flows so far belong to.

    Prefect 3.7.7 notes that by the id of each result, for as long as the flow runs: 2.5 KB for a
    step. Nothing that a run's flow calls takes a step's result, so there is no link to be drawn; and
    an id that is used again draws a wrong one (https://github.com/PrefectHQ/prefect/issues/20558).
    """
    context = FlowRunContext.get()
    if context is not None:
        context.run_results.clear()


@contextlib.contextmanager
def one_client() -> Iterator[None]:
    """During the body, one client of Prefect's server begins the flow runs of all steps.

    Prefect 3.7.7 makes one for each of them, which reads a file of certificates and connects.
    """
    with AsyncClientContext() as context:
        run_coro_as_sync(context.client.__aenter__())
        try:
            yield
        finally:
            run_coro_as_sync(context.client.__aexit__(None, None, None))


def without_state_data(record: dict[str, Any]) -> dict[str, Any]:
    """A JSON object of an answer; where it is a state, without its data.

    Prefect's server gives details with each state, and its client takes whatever has a storage key
    for the place of a result.
    """
    data = record.get("data")
    if data is None:
        return record
    if "state_details" in record or (isinstance(data, dict) and "storage_key" in data):
        return {**record, "data": None}
    return record


def _json(answer: httpx.Response, **options: Any) -> Any:
    """An answer of Prefect's API, whose states have no data: no results are taken from there.

    Refrain persists no results, so none of its own states has such data at the API. Somebody who can
    write there could force a flow run into a state whose data name a pickle in a storage block of
    theirs, and the flow's engine would load it, whatever `persist_result` says (Prefect 3.7.7). It is
    dropped where an answer is parsed, before a model of Prefect's sees it: to check the name of a
    serializer's library, those import it.
    """
    return httpx.Response.json(answer, **{"object_hook": without_state_data, **options})


# Here, since every flow of a run takes its options from this module.
PrefectResponse.json = _json  # type: ignore[method-assign, assignment]
