"""Which deployments are registered, with which settings: those that come, changed for a team.

They are written into a file of Prefect's own form, which `prefect deploy` registers.
"""

from __future__ import annotations

import copy
import difflib
import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from configs.deployments import DeploymentEntry, DeploymentFile, words_of
from configs.overrides import ConfigError, value_of
from configs.recipe import DEMO, find_recipe, load_recipe
from engines.processes.node_process import python_path
from tasks.run.recorded_flow import load_flow, settings_class

RECIPE = "tasks.launch.registration.recipe"  # the build step that loads one
OURS = "flows."
SHARED = ("tracking", "store", "cluster")  # settings that are of a team, whatever is trained
SQLITE = "sqlite:"  # how the address of curves in a local file begins
ENQUEUE = "ENQUEUE"
# Prefect 3.7 has each that waits ask again after half a minute.
WAITING = (
    "Runs at once: {limit}. Others wait, and not in a queue: a place goes to the first that asks "
    "once it is free, which may be the newest."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployments:
    """What `prefect deploy` is given."""

    file: Mapping[str, Any]  # of the form of a prefect.yaml
    curves: Mapping[str, str]  # name of each that has a recipe -> where its curves go

    @property
    def names(self) -> list[str]:
        return [one["name"] for one in self.file["deployments"]]

    @property
    def pools(self) -> list[str]:
        """Work pools, by name."""
        return sorted({one["work_pool"]["name"] for one in self.file["deployments"]})

    def warnings(self) -> list[str]:
        """A sentence where curves are kept where nobody else sees them."""
        local: dict[str, list[str]] = {}
        for name, uri in self.curves.items():
            if uri.startswith(SQLITE):
                local.setdefault(uri, []).append(name)
        return [
            f"Curves of {', '.join(names)} go to {uri}, a file on the machine that runs them, which "
            "others do not see. Give tracking.uri=http://… of your team's MLflow (refrain servers)."
            for uri, names in local.items()
        ]


def deployments(
    shipped: Path, names: Sequence[str], words: Sequence[str], team: DeploymentFile | None
) -> Deployments:
    """Those of a team's file, or without one those that come; of them the ones named, or all.

    Args:
        shipped: infra/prefect.yaml.
        names: of deployments; none: all.
        words: settings key=value, which come after those of the file.

    Raises ConfigError, also where a setting does not fit a recipe.
    """
    file = yaml.safe_load(shipped.read_text())
    template = file.pop("definitions")["deployment"]
    known = {one["name"]: one for one in file["deployments"]}
    found, own, everywhere = known, dict[str, list[str]](), list[str]()
    if team is not None:
        found = {one.name: _entry(one, known, template) for one in team.deployments}
        own = {one.name: words_of(one.settings) for one in team.deployments}
        everywhere = words_of(team.settings)
    for name in names:
        if name not in found:
            near = difflib.get_close_matches(name, found, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"There is no deployment {name}. {hint}There are: {', '.join(found)}."
            )
    entries, curves = [], {}
    for name in names or found:
        entry = copy.deepcopy(found[name])
        uri = _set(entry, [*everywhere, *own.get(name, ()), *words])
        if uri is not None:
            curves[name] = uri
        entries.append(_with_limit_told(entry))
    return Deployments(file={**file, "deployments": entries}, curves=curves)


def _entry(
    one: DeploymentEntry, known: Mapping[str, Any], template: Mapping[str, Any]
) -> dict[str, Any]:
    """An entry of a team's file as one of Prefect's."""
    base = known.get(one.name)
    if base is None or one.flow is not None or one.recipe is not None:
        flow = one.flow or (_flow_of(base) if base else "grpo")
        recipe = one.recipe or DEMO
        path = str(find_recipe(recipe).absolute()) if "/" in recipe else recipe
        made = {
            **template,
            "name": one.name,
            "entrypoint": _module_path(flow).replace(":", "."),
            "tags": [flow.rpartition(":")[2]],
            "build": [{RECIPE: {"id": "recipe", "name": path, "flow": flow}}],
        }
        if not _module_path(flow).startswith(OURS):
            made["work_pool"] = {**template["work_pool"], "job_variables": own_flow_variables()}
    else:
        made = dict(base)
    own = one.of_prefect()
    for key in ("parameters", "work_pool"):  # what they do not name stays
        if isinstance(own.get(key), dict):
            own[key] = {**made.get(key, {}), **own[key]}
    return {**made, **own}


def _with_limit_told(entry: dict[str, Any]) -> dict[str, Any]:
    """What a run that finds others at work does, in the description that the page shows."""
    limit = entry.get("concurrency_limit")
    if isinstance(limit, dict) and limit.get("collision_strategy", ENQUEUE) == ENQUEUE:
        said = WAITING.format(limit=limit["limit"])
        entry["description"] = f"{entry.get('description', '')} {said}".strip()
    return entry


def own_flow_variables() -> dict[str, Any]:
    """Variables of a process pool's jobs for a flow of the folder that is deployed from."""
    return {
        "working_dir": os.getcwd(),
        # The second: a user's own modules in the folder must not hide ours.
        "env": {"PYTHONPATH": python_path(), "PYTHONSAFEPATH": "1"},
    }


def _module_path(flow: str) -> str:
    return flow if ":" in flow else f"{OURS}{flow}:{flow}"


def _flow_of(entry: Mapping[str, Any]) -> str:
    """package.module:function of an entry's flow."""
    module, _, function = str(entry["entrypoint"]).rpartition(".")
    return f"{module}:{function}"


def _set(entry: dict[str, Any], words: Sequence[str]) -> str | None:
    """Give an entry its settings; where its curves go, if it has a recipe."""
    build = next((step[RECIPE] for step in entry.get("build", []) if RECIPE in step), None)
    if build is None:
        _set_parameters(entry, [word for word in words if word.startswith(SHARED)])
        return None
    settings = {**(build.get("settings") or {}), **dict(_pair(word) for word in words)}
    build["settings"] = settings
    flow = load_flow(build.get("flow", "grpo"))
    try:
        config = load_recipe(settings_class(flow), build["name"], words_of(settings))
    except ConfigError as error:
        raise ConfigError(f"Deployment {entry['name']}: {error}") from None
    return config.tracking.uri


def _set_parameters(entry: dict[str, Any], words: Sequence[str]) -> None:
    """Settings of a flow that takes no recipe, as far as it has such.

    As its own, or as those of the run that it works on, where it takes such as key=value.
    """
    model = typing.get_type_hints(load_flow(_flow_of(entry)).fn).get("config")
    fields = getattr(model, "model_fields", {})
    given = dict(entry.get("parameters", {}).get("config") or {})
    own = [word for word in words if word.partition(".")[0] in fields]
    if "settings" in fields:
        given["settings"] = [
            *given.get("settings", ()),
            *(word for word in words if word not in own),
        ]
    for word in own:
        key, value = _pair(word)
        *groups, last = key.split(".")
        place = given
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value_of(value)
    if given:
        entry["parameters"] = {**entry.get("parameters", {}), "config": given}


def _pair(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key, value
