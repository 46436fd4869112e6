"""What a run's flow run is called in the dashboard's lists.

A name that a person typed stays, and the run's name in the store is a tag of it. In the place of one
that Prefect made up stands the run's name; where a person may have typed the very same, it is a tag.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import prefect
from coolname.data import config as vocabulary  # Prefect's, of which its server makes names
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.runtime import flow_run

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
    known: Any = vocabulary
    return frozenset(word for name in lists for word in known[name]["words"])


@cache
def _names_of_the_form() -> re.Pattern[str] | None:
    """None where the dashboard of this Prefect has other words: names of its form are kept then."""
    found: dict[str, str] = {}
    for path in Path(prefect.__file__).parent.glob("server/ui/assets/index-*.js"):
        program = path.read_text(errors="replace")
        for begin in OF_THE_FORM:
            if words := re.search(rf"[`'\"]({re.escape(begin)}[a-zA-Z0-9.-]*)[`'\"]", program):
                found[begin] = "|".join(map(re.escape, filter(None, words[1].split("."))))
    if len(found) < len(OF_THE_FORM):
        return None
    letter, place, region = (found[begin] for begin in OF_THE_FORM)
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
    found = context.flow_run
    if not made_up(found.name):
        if tag is not None:
            _tag(found, tag)
        return
    if _may_be_typed(found):
        _tag(found, found.name)
    with get_client(sync_client=True) as client:
        client.update_flow_run(found.id, name=name)
    found.name = name


def _may_be_typed(found: FlowRun) -> bool:
    """Whether a person may have given the flow run the name that looks made up."""
    by_a_person = found.deployment_id is not None and not found.auto_scheduled
    return by_a_person and not found.name.endswith(NOT_BEGUN)


def _tag(found: FlowRun, tag: str) -> None:
    if tag in found.tags:
        return
    found.tags = [*found.tags, tag]
    with get_client(sync_client=True) as client:
        client.update_flow_run(found.id, tags=found.tags)
