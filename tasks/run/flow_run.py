"""Which flow run this is, where its page is, which attempt of it, and what it is called.

A name that a person typed stays, and the run's name in the store is a tag of it. In the place of one
that Prefect made up stands the run's name; where a person may have typed the very same, it is a tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID

import prefect
from coolname.data import config as vocabulary
from prefect import Flow, Task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
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
    run_id = flow_run_id()
    return url_for("flow-run", obj_id=run_id) if run_id else None


def attempt() -> int:
    """Which attempt of the flow run this is, from 1: by Retry, by its retries, or after a crash.

    Its states are counted: Prefect counts attempts anew after Retry on the flow run's page.
    """
    run_id = flow_run_id()
    if run_id is None:
        return 1
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(run_id)
    return max(1, sum(state.is_running() for state in states))


def begun_before(store: Store, family: str) -> RunStore | None:
    """The run that an earlier attempt of this flow run began; None where none came so far.

    Of several, which rollbacks make, the first. family: what the names of its runs begin with.
    """
    run_id = flow_run_id()
    if run_id is None:
        return None
    names = (name for name in store.children() if name.startswith(f"{family}-"))
    runs = (RunStore(store, name) for name in names if RUN_NAME.fullmatch(name))
    return next((run for run in runs if run.constant(FIELD) == str(run_id)), None)


def part_from_earlier_attempts(attempt: int, flows: Iterable[object] = ()) -> None:
    """Have a later attempt's flow runs below this one be its own, and end what a crash left.

    Prefect 3.7.7 tells the flow runs below one by their flow and the order of the calls, so the first
    step of a later attempt would be the first attempt's first step, run again under another name. A
    process that was killed leaves those that it had under way running for ever. To be called once
    no earlier attempt lives: when this one holds the run, or the run is done.
    """
    context, run_id = FlowRunContext.get(), flow_run_id()
    if context is None or run_id is None:
        return
    for flow in flows:
        if isinstance(flow, Flow):
            context.task_run_dynamic_keys[Task(flow.fn).task_key] = attempt * NUMBERS
    below = FlowRunFilter(
        parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run_id]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(UNDER_WAY))),
    )
    ended: State[None] = Crashed(message=f"The process of attempt {attempt - 1} has ended.")
    with get_client(sync_client=True) as client:
        for child in client.read_flow_runs(flow_run_filter=below):
            client.set_flow_run_state(child.id, ended, force=True)


ADJECTIVES = ("adjective", "adjective_near", "noun_adjective", "prefix", "size")
ANIMALS = ("animal", "animal_breed", "animal_legendary")
# Lists of words in the dashboard's program, of which the form of a deployment makes names such as
# beta3-lyrae or omega417-uxmal-reach. Each begins so.
OF_THE_FORM = ("alpha.alpha2.", "andromedae.antliae.", "a.b.c.")
NOT_BEGUN = " (not begun)"


def made_up(name: str) -> bool:
    """Whether Prefect's server makes such names, or its form, or `name_before`."""
    first, _, second = name.partition("-")
    pair = first in _words(ADJECTIVES) and second in _words(ANIMALS)
    form = _names_of_the_form()
    return pair or bool(form and form.fullmatch(name)) or name.endswith(NOT_BEGUN)


@cache
def _words(lists: tuple[str, ...]) -> frozenset[str]:
    lists_by_name: Any = vocabulary
    return frozenset(word for name in lists for word in lists_by_name[name]["words"])


@cache
def _names_of_the_form() -> re.Pattern[str] | None:
    """None where the dashboard of this Prefect has other words: names of its form are kept then."""
    patterns: dict[str, str] = {}
    for path in Path(prefect.__file__).parent.glob("server/ui/assets/index-*.js"):
        program = path.read_text(errors="replace")
        for begin in OF_THE_FORM:
            if words := re.search(rf"[`'\"]({re.escape(begin)}[a-zA-Z0-9.-]*)[`'\"]", program):
                patterns[begin] = "|".join(map(re.escape, filter(None, words[1].split("."))))
    if len(patterns) < len(OF_THE_FORM):
        return None
    letter, place, region = (patterns[begin] for begin in OF_THE_FORM)
    letter = letter.replace("RANDOM", "[0-9]{2,3}")
    return re.compile(rf"(?:{letter})-(?:(?:{place})(?:-(?:{region}))?|-(?:{region}))")


def name_before(family: str) -> None:
    """Call the flow run after the family of its run, which may be refused before it has a name."""
    _name(f"{family}{NOT_BEGUN}")


def name_after(run: str) -> None:
    """Call the flow run as its run is called in the store or, where it has a name, tag it so."""
    _name(run, tag=run)


def evaluation_name() -> str:
    """Of a flow run that evaluates a stored run, as its flow's `flow_run_name`."""
    name = str(flow_run.name)
    if not made_up(name):
        return name
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None and _may_be_typed(context.flow_run):
        _tag(context.flow_run, name)
    return f"evaluate {flow_run.parameters['config'].run}"


def _name(name: str, tag: str | None = None) -> None:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.name == name:
        return
    current = context.flow_run
    if not made_up(current.name):
        if tag is not None:
            _tag(current, tag)
        return
    if _may_be_typed(current):
        _tag(current, current.name)
    with get_client(sync_client=True) as client:
        client.update_flow_run(current.id, name=name)
    current.name = name


def _may_be_typed(run: FlowRun) -> bool:
    """Whether a person may have given the flow run the name that looks made up."""
    by_a_person = run.deployment_id is not None and not run.auto_scheduled
    return by_a_person and not run.name.endswith(NOT_BEGUN)


def _tag(run: FlowRun, tag: str) -> None:
    if tag in run.tags:
        return
    run.tags = [*run.tags, tag]
    with get_client(sync_client=True) as client:
        client.update_flow_run(run.id, tags=run.tags)
