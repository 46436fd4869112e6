"""Which flow run this is, where its page is, and which run an earlier attempt of it began."""

from __future__ import annotations

from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.runtime import deployment, flow_run
from prefect.utilities.urls import url_for

from storage.objects.store import Store
from storage.runs.run_store import RUN_NAME, RunStore

FIELD = "flow_run"  # of run.json: the id of the flow run that began the run


def flow_run_id() -> UUID | None:
    """Id of the flow run that this is called in; None outside one."""
    return UUID(flow_run.id) if flow_run.id else None


def deployment_name() -> str | None:
    """The deployment whose run this is; None of a run that a command began."""
    return deployment.name


def flow_run_url() -> str | None:
    """Page of the flow run on the dashboard."""
    found = flow_run_id()
    return url_for("flow-run", obj_id=found) if found else None


def begun_before(store: Store, family: str) -> str | None:
    """The run that an earlier attempt of this flow run began, as after Retry on its page.

    None: this is the first attempt, or none came so far. Of several, which rollbacks make, the first.

    family: what the names of its runs begin with.
    """
    found = flow_run_id()
    if found is None:
        return None
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(found)
    if sum(state.is_running() for state in states) < 2:
        return None
    names = (name for name in store.children() if name.startswith(f"{family}-"))
    runs = (RunStore(store, name) for name in names if RUN_NAME.fullmatch(name))
    return next((run.run for run in runs if run.constant(FIELD) == str(found)), None)
