"""What a run's flow run is called in the dashboard's lists.

A name that a person typed stays, and the run's name in the store is a tag of it. In the place of one
that Prefect made up stands the run's name.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from coolname.data import config as vocabulary  # Prefect's, of which its server makes names
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.runtime import flow_run

ADJECTIVES = ("adjective", "adjective_near", "noun_adjective", "prefix", "size")
ANIMALS = ("animal", "animal_breed", "animal_legendary")
LETTERS = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma|"
    "tau|upsilon|phi|chi|psi|omega"
)
# What the form of a deployment fills in, such as beta3-lyrae or omega417-uxmal-reach. Without a
# number, as one in nine is, it may be a person's.
OF_THE_FORM = re.compile(rf"(?:{LETTERS})\d{{1,3}}(?:-[a-z]+){{1,3}}")
NOT_BEGUN = " (not begun)"


def made_up(name: str) -> bool:
    """Whether nobody typed the name: Prefect's server did, its form, or `name_before`."""
    first, _, second = name.partition("-")
    pair = first in _words(ADJECTIVES) and second in _words(ANIMALS)
    return pair or bool(OF_THE_FORM.fullmatch(name)) or name.endswith(NOT_BEGUN)


@cache
def _words(lists: tuple[str, ...]) -> frozenset[str]:
    known: Any = vocabulary
    return frozenset(word for name in lists for word in known[name]["words"])


def name_before(family: str) -> None:
    """Call the flow run after the family of its run, which may be refused before it has a name."""
    _name(f"{family}{NOT_BEGUN}")


def name_after(run: str) -> None:
    """Call the flow run as its run is called in the store or, where it has a name, tag it so."""
    _name(run, tag=run)


def evaluation_name() -> str:
    """Of a flow run that evaluates a stored run, as its flow's `flow_run_name`."""
    name = str(flow_run.name)
    return f"evaluate {flow_run.parameters['config'].run}" if made_up(name) else name


def _name(name: str, tag: str | None = None) -> None:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.name == name:
        return
    found = context.flow_run
    with get_client(sync_client=True) as client:
        if made_up(found.name):
            client.update_flow_run(found.id, name=name)
            found.name = name
        elif tag is not None and tag not in found.tags:
            found.tags = [*found.tags, tag]
            client.update_flow_run(found.id, tags=found.tags)
