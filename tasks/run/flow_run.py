"""Which flow run this is, and where its page is."""

from __future__ import annotations

from uuid import UUID

from prefect.runtime import flow_run
from prefect.utilities.urls import url_for


def flow_run_id() -> UUID | None:
    """Id of the flow run that this is called in; None outside one."""
    return UUID(flow_run.id) if flow_run.id else None


def flow_run_url() -> str | None:
    """Page of the flow run on the dashboard."""
    found = flow_run_id()
    return url_for("flow-run", obj_id=found) if found else None
