"""How a person goes on with a run that was stopped or has failed, for the page of its flow run."""

from __future__ import annotations

import contextlib
import contextvars
import json
import threading
from urllib.parse import quote

import httpx
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger
from prefect.utilities.urls import url_for

from configs.flows import resume_command
from configs.storage import StoreConfig
from tasks.markdown import code, escaped
from tasks.run.facts import RunFacts

DEPLOYMENT = "resume/resume"  # of infra/prefect.yaml
PATIENCE = 1.0  # seconds for the page of a run that ends, perhaps by a signal


def ways_on(facts: RunFacts) -> list[str]:
    """Markdown lines: Retry where a worker can press on, the form of the deployment, the command."""
    again = resume_command(facts.flow, facts.config.store, facts.name)
    context, form = FlowRunContext.get(), form_link(facts.config.store, facts.name)
    deployed = (
        context is not None and context.flow_run is not None and context.flow_run.deployment_id
    )
    return [
        *(["- **Retry** on this page goes on from its last committed step."] if deployed else []),
        *([f"- [The form of the deployment resume]({form}), with changes too."] if form else []),
        f"- In a shell: {code(again)}",
    ]


def form_link(store: StoreConfig, run: str) -> str | None:
    """Address of the form that asks for the run, filled in; None where it is not deployed."""
    with get_client(sync_client=True) as client, contextlib.suppress(PrefectException):
        found = client.read_deployment_by_name(DEPLOYMENT)
        where = store.model_dump(mode="json", include={"uri", "options"})
        asked = {"config": {"run": run, "store": where}}
        page = url_for("deployment", obj_id=found.id)
        # Twice: Prefect 3.7's form decodes what its router has decoded.
        return page and f"{page}/run?parameters={quote(quote(json.dumps(asked)))}"
    return None


def show_ways_on(facts: RunFacts, key: str, step: int, ways: list[str]) -> None:
    """Say on the page, and in its log, that the run has stopped and how to go on with it.

    ways: as `ways_on` has them. A server that does not answer is not waited for.
    """

    def show() -> None:
        stopped = f"{facts.name} has stopped after step {step} of {facts.config.steps}"
        with contextlib.suppress(PrefectException, httpx.HTTPError):
            get_run_logger().warning("%s. To go on:\n%s", stopped, "\n".join(ways))
            create_markdown_artifact(
                key=key,
                markdown="\n".join([f"### {escaped(stopped)}", "", "To go on:", "", *ways]),
                description=f"{stopped}: how to go on.",
            )

    run = contextvars.copy_context().run  # which flow run's page it is
    shown = threading.Thread(target=run, args=(show,), name="ways-on", daemon=True)
    shown.start()
    shown.join(PATIENCE)
