"""Which flow run this is, where its page is, which attempt of it, and what earlier ones began."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from prefect import Flow, Task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.context import FlowRunContext
from prefect.runtime import deployment, flow_run
from prefect.states import Crashed, State
from prefect.utilities.urls import url_for

from storage.objects.store import Store
from storage.runs.run_store import RUN_NAME, RunStore

FIELD = "flow_run"  # of run.json: the id of the flow run that began the run
UNDER_WAY = (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING)
NUMBERS = 1_000_000  # of the flow runs below one, for each of its attempts


def flow_run_id() -> UUID | None:
    """Id of the flow run that this is called in; None outside one."""
    return UUID(flow_run.id) if flow_run.id else None


def deployment_name() -> str | None:
    """The deployment whose run this is; None of a run that a command began."""
    return deployment.name


def filled_in(settings: type[object]) -> bool:
    """Whether the flow run's parameters are a form's, with all settings of this type, set or not."""
    return deployment.name is not None and isinstance(flow_run.parameters.get("config"), settings)


def flow_run_url() -> str | None:
    """Page of the flow run on the dashboard."""
    found = flow_run_id()
    return url_for("flow-run", obj_id=found) if found else None


def attempt() -> int:
    """Which attempt of the flow run this is, from 1: by Retry, by its retries, or after a crash.

    Its states are counted: Prefect counts attempts anew after Retry on the flow run's page.
    """
    found = flow_run_id()
    if found is None:
        return 1
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(found)
    return max(1, sum(state.is_running() for state in states))


def begun_before(store: Store, family: str) -> RunStore | None:
    """The run that an earlier attempt of this flow run began; None where none came so far.

    Of several, which rollbacks make, the first. family: what the names of its runs begin with.
    """
    found = flow_run_id()
    if found is None:
        return None
    names = (name for name in store.children() if name.startswith(f"{family}-"))
    runs = (RunStore(store, name) for name in names if RUN_NAME.fullmatch(name))
    return next((run for run in runs if run.constant(FIELD) == str(found)), None)


def part_from_earlier_attempts(attempt: int, flows: Iterable[object] = ()) -> None:
    """Have a later attempt's flow runs below this one be its own, and end what a crash left.

    Prefect 3.7.7 tells the flow runs below one by their flow and the order of the calls, so the first
    step of a later attempt would be the first attempt's first step, run again under another name. A
    process that was killed leaves those that it had under way running for ever. To be called once
    no earlier attempt lives: when this one holds the run, or the run is done.
    """
    context, found = FlowRunContext.get(), flow_run_id()
    if context is None or found is None:
        return
    for one in flows:
        if isinstance(one, Flow):
            context.task_run_dynamic_keys[Task(one.fn).task_key] = attempt * NUMBERS
    below = FlowRunFilter(
        parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[found]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(UNDER_WAY))),
    )
    ended: State[None] = Crashed(message=f"The process of attempt {attempt - 1} has ended.")
    with get_client(sync_client=True) as client:
        for child in client.read_flow_runs(flow_run_filter=below):
            client.set_flow_run_state(child.id, ended, force=True)
