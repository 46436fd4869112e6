"""The flow `resume`, a deployment's form: it goes on with a stored run by the flow that made it.

What any resumed run does is in tasks/run/opening.py.
"""

from __future__ import annotations

from typing import Any, cast

from prefect.context import FlowRunContext
from prefect.states import State

from configs.grpo import GRPOConfig
from configs.overrides import change, validate
from configs.process import begin_process
from configs.resume import ResumeConfig
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tasks.commands.command import find_run
from tasks.results import RunSummary
from tasks.run.run_record import flow_of, load_flow, settings_class, stored_settings


def go_on(settings: ResumeConfig) -> RunSummary | State[None]:
    """Make the steps that are left, as this flow run. Raises ConfigError where it may not go on."""
    begin_process()
    files = find_run(Store(settings.store.uri, settings.store.options), settings.run)
    flow = load_flow(flow_of(files))
    config = settings_for(files, settings_class(flow), settings)
    context = FlowRunContext.get()
    assert context is not None, "go_on() is the body of a flow"
    with context.model_copy(update={"flow": flow}):  # whose run it is from here on
        return cast("RunSummary | State[None]", flow.fn(config=config, resume=settings.run))


def settings_for(files: RunStore, model: type[GRPOConfig], config: ResumeConfig) -> GRPOConfig:
    """The settings that the run began with, and what changes; it may have been moved meanwhile."""
    settings: dict[str, Any] = validate(model, stored_settings(files)).model_dump(mode="json")
    settings["store"] |= {"uri": config.store.uri, "options": config.store.options}
    return change(model, settings, config.words)
