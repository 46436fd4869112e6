"""Registering work pool, deployments and automations on a Prefect server.

Which deployments, with which settings: those that come, changed for a team. They are written into a
file of Prefect's own form, which `prefect deploy` registers.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import os
import subprocess
import sys
import tempfile
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import httpx
import yaml
from prefect.automations import Automation
from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import EntrypointType, RunnerDeployment
from prefect.exceptions import ObjectNotFound
from pydantic import TypeAdapter

from configs.credentials import credential_sentence
from configs.deployments import DeploymentEntry, DeploymentFile, words_of
from configs.environment import import_from_working_folder
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError, filled_in, no_such_settings, read_yaml
from configs.recipe import DEMO, find_recipe, load_recipe
from engines.processes.node import python_path
from tasks.launch.server import ServerError
from tasks.run.run_record import load_flow, settings_class

RECIPE = "tasks.launch.registration.recipe"  # the build step that loads one
OURS = "flows."
SHARED = ("tracking", "store", "cluster")  # settings that are of a team, whatever is trained
CONFIG = "{{ recipe.config }}"  # the parameter that the build step makes
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
    left_out: Mapping[str, Sequence[str]]  # name of each without -> settings of all that it lacks

    @property
    def names(self) -> list[str]:
        return [deployment["name"] for deployment in self.file["deployments"]]

    @property
    def pools(self) -> list[str]:
        """Work pools, by name."""
        return sorted({deployment["work_pool"]["name"] for deployment in self.file["deployments"]})

    def warnings(self) -> list[str]:
        """Sentences: what of the settings of all one does not have, and whose curves nobody sees."""
        local: dict[str, list[str]] = {}
        for name, uri in self.curves.items():
            if uri.startswith(SQLITE):
                local.setdefault(uri, []).append(name)
        return [
            f"Deployment {name} has no {', '.join(_pair(word)[0] for word in words)}: left out there."
            for name, words in self.left_out.items()
        ] + [
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
        words: settings key=value, which come after those of the file. Where one deployment is named
            they are its own, else those of all.

    Settings of all are left out where a flow takes no recipe and does not have them. Raises
    ConfigError, also where a setting does not fit a recipe or a flow.
    """
    file = yaml.safe_load(shipped.read_text())
    template = file.pop("definitions")["deployment"]
    ours = {deployment["name"]: deployment for deployment in file["deployments"]}
    by_name, words_by_name, everywhere = ours, dict[str, list[str]](), list[str]()
    if team is not None:
        by_name = {
            deployment.name: _entry(deployment, ours, template) for deployment in team.deployments
        }
        words_by_name = {
            deployment.name: words_of(deployment.settings) for deployment in team.deployments
        }
        everywhere = words_of(team.settings)
    for name in names:
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"There is no deployment {name}. {hint}There are: {', '.join(by_name)}."
            )
    of_runs = [
        entry for entry in (*ours.values(), *by_name.values()) if _recipe_of(entry) is not None
    ]
    runs = [*dict.fromkeys(settings_class(load_flow(_flow_of(entry))) for entry in of_runs)]
    shared = [*everywhere, *(words if len(names) != 1 else ())]
    entries, curves, left_out = [], {}, {}
    for name in names or by_name:
        entry = copy.deepcopy(by_name[name])
        build, settings = _recipe_of(entry), [*everywhere, *words_by_name.get(name, ()), *words]
        try:
            _check_parameters(entry)
            if build is None:
                left_out[name] = _fill_in(entry, settings, shared, runs)
            else:
                config = _loaded(entry, build, settings)
                curves[name] = config.tracking.uri
        except ConfigError as error:
            raise ConfigError(f"Deployment {name}: {error}") from None
        entries.append(_with_limit_told(entry))
    nowhere = [word for word in shared if all(word in absent for absent in left_out.values())]
    if nowhere and not curves:
        raise ConfigError(f"{_pair(nowhere[0])[0]}: none of these deployments has such a setting.")
    return Deployments(
        file={**file, "deployments": entries},
        curves=curves,
        left_out={name: words for name, words in left_out.items() if words},
    )


def _entry(
    deployment: DeploymentEntry, ours: Mapping[str, Any], template: Mapping[str, Any]
) -> dict[str, Any]:
    """An entry of a team's file as one of Prefect's."""
    base = ours.get(deployment.name)
    if deployment.flow is not None and deployment.recipe is None:
        flow = _module_path(deployment.flow)
        alike = (of for of in ours.values() if _recipe_of(of) is None and _flow_of(of) == flow)
        base = next(alike, None)
    if (
        base is None
        or deployment.recipe is not None
        or (deployment.flow is not None and _recipe_of(base))
    ):
        flow = deployment.flow or (_flow_of(base) if base else "grpo")
        recipe = deployment.recipe or DEMO
        path = str(find_recipe(recipe).absolute()) if "/" in recipe else recipe
        entry = {
            **template,
            "name": deployment.name,
            "entrypoint": _module_path(flow).replace(":", "."),
            "tags": [flow.rpartition(":")[2]],
            "build": [{RECIPE: {"id": "recipe", "name": path, "flow": flow}}],
        }
        if not _module_path(flow).startswith(OURS):
            entry["work_pool"] = {**template["work_pool"], "job_variables": own_flow_variables()}
    else:
        entry = {**base, "name": deployment.name}
    changes = deployment.of_prefect()
    for key in ("parameters", "work_pool"):  # what they do not name stays
        if isinstance(changes.get(key), dict):
            changes[key] = {**entry.get(key, {}), **changes[key]}
    return {**entry, **changes}


def _with_limit_told(entry: dict[str, Any]) -> dict[str, Any]:
    """What a run that finds others at work does, in the description that the page shows."""
    limit = entry.get("concurrency_limit")
    if isinstance(limit, dict) and limit.get("collision_strategy", ENQUEUE) == ENQUEUE:
        sentence = WAITING.format(limit=limit["limit"])
        entry["description"] = f"{entry.get('description', '')} {sentence}".strip()
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


def _recipe_of(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """The build step that loads an entry's recipe; None where its flow takes none."""
    return next((step[RECIPE] for step in entry.get("build", []) if RECIPE in step), None)


def _check_parameters(entry: Mapping[str, Any]) -> None:
    """ConfigError for a parameter that the entry's flow has not."""
    parameters = inspect.signature(load_flow(_flow_of(entry)).fn).parameters
    for name in entry.get("parameters", {}):
        if name not in parameters:
            raise ConfigError(
                f"parameters.{name}: its flow has no such parameter. It has {', '.join(parameters)}."
            )


def _loaded(entry: Mapping[str, Any], build: dict[str, Any], words: Sequence[str]) -> GRPOConfig:
    """The settings of an entry that has a recipe, which the words are added to."""
    if entry["parameters"].get("config") != CONFIG:
        raise ConfigError("parameters.config is made from the recipe. Give settings instead.")
    settings = {**(build.get("settings") or {}), **dict(_pair(word) for word in words)}
    build["settings"] = settings
    flow = load_flow(build.get("flow", "grpo"))
    return load_recipe(settings_class(flow), build["name"], words_of(settings))


def _fill_in(
    entry: dict[str, Any],
    words: Sequence[str],
    shared: Collection[str],
    runs: Sequence[type[GRPOConfig]],
) -> list[str]:
    """Give settings to an entry whose flow takes no recipe; returns those that it does not take.

    As the flow's own, or as those of the run that it works on, where it takes such as key=value.

    Args:
        words: settings, of which the last counts; it must have those that are not in `shared`.
        shared: those of all entries. Of settings of runs it takes what says where things are.
        runs: classes of runs' settings.
    """
    model = typing.get_type_hints(load_flow(_flow_of(entry)).fn)["config"]
    fields, parameters = model.model_fields, {**entry.get("parameters", {}).get("config", {})}
    settings, left_out = list[str](), list[str]()
    for word in words:
        group = _group(word)
        places = group in SHARED and (group in fields or "settings" in fields)
        its_own = group in fields and group not in GRPOConfig.model_fields
        (settings if word not in shared or places or its_own else left_out).append(word)
    if "settings" in fields:
        of_run = [word for word in settings if _group(word) not in fields]
        _check_settings_of_runs(of_run, runs)
        parameters |= {"settings": [*parameters.get("settings", ()), *of_run]} if of_run else {}
        settings = [word for word in settings if word not in of_run]
    config = filled_in(model, parameters, settings)
    entry["parameters"] = {**entry.get("parameters", {}), "config": config}
    return left_out


def _group(word: str) -> str:
    """The first part of a setting's name."""
    return _pair(word)[0].partition(".")[0]


def _check_settings_of_runs(words: Sequence[str], runs: Sequence[type[GRPOConfig]]) -> None:
    """ConfigError for a word that is no setting of any run."""
    recipe = read_yaml(find_recipe("tiny").read_text())
    for word in words:
        faults = [no_such_settings(model, recipe, [word]) for model in runs]
        if all(faults):
            raise ConfigError("\n".join(faults[0]))


def _pair(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key, value


INFRA = Path(str(files("infra")))  # a package of files, so that an installed Refrain has them too
PREFECT_FILE = INFRA / "prefect.yaml"
AUTOMATIONS_FILE = INFRA / "automations.yaml"
ATTEMPTS = 3  # at a server that does not answer in time
POOL = "refrain"  # of the deployments in prefect.yaml
MESSAGE = "{{ automation.description }}\n\n{{ event.event }} {{ event.payload }}"


class NotDeployed(ServerError):
    """The deployments could not be registered; the message says why."""


def check_server(api: str | None) -> str:
    """The address, if a Prefect server answers there; NotDeployed else."""
    if api is None:
        raise NotDeployed(
            "PREFECT_API_URL is not set, so there is no server to deploy to. Start one with "
            "`prefect server start` and set PREFECT_API_URL=http://127.0.0.1:4200/api."
        )
    try:
        httpx.get(f"{api}/health", timeout=10).raise_for_status()
    except httpx.HTTPError as error:
        raise NotDeployed(
            f"No Prefect server answers at PREFECT_API_URL = {api} ({error}). Start it, or set "
            "PREFECT_API_URL to the API of a running one."
        ) from None
    return api


def patiently(register: Callable[[], list[str]]) -> list[str]:
    """What `register` returns; asked again where a busy server does not answer in time.

    What it does twice must come to the same. Raises NotDeployed.
    """
    for tries in reversed(range(ATTEMPTS)):
        try:
            return register()
        except httpx.TransportError as error:
            if not tries:
                raise NotDeployed(
                    f"The Prefect server did not answer {ATTEMPTS} times ({type(error).__name__}: "
                    f"{error}). Deploy again when it is less busy, or set "
                    "PREFECT_API_REQUEST_TIMEOUT higher; what is there already is brought up to date."
                ) from error
    raise AssertionError("not reached")


def ensure_pools(client: SyncPrefectClient, names: list[str]) -> list[str]:
    """These work pools, made as process pools where they are missing."""
    for name in names:
        try:
            client.read_work_pool(name)
        except ObjectNotFound:
            client.create_work_pool(WorkPoolCreate(name=name, type="process"))
    return names


def register_deployments(declared: Deployments) -> None:
    """All of these, by Prefect's own command."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prefect.yaml"
        file.write_text(yaml.safe_dump(declared.file, sort_keys=False))
        done = subprocess.run(
            [*command, "--prefect-file", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if done.returncode:
        raise NotDeployed(f"prefect deploy failed:\n{done.stdout.strip()}")


def register_flow(path: str, recipe: str, words: Sequence[str]) -> str:
    """A deployment of the flow at `package.module:function` with a recipe; returns its name.

    It is named after the recipe's run family, and is on the work pool of the other deployments. Its
    runs work in the folder that this is called in, with the modules that are found from here.
    """
    flow = load_flow(path)
    config = _without_credentials(load_recipe(settings_class(flow), recipe, words))
    limit = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE)
    deployment = RunnerDeployment.from_flow(
        flow,
        name=config.name,
        parameters={"config": config.model_dump(mode="json")},
        tags=[flow.name],
        concurrency_limit=limit,
        work_pool_name=POOL,
        job_variables=own_flow_variables(),
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    deployment.apply()
    return f"{flow.name}/{config.name}"


def register_automations(notify: str | None = None, path: Path = AUTOMATIONS_FILE) -> list[str]:
    """The file's automations, made or brought up to date by name; returns the names.

    notify: a notification block, type/name, through which they speak.
    """
    declared = yaml.safe_load(path.read_text())["automations"]
    return [_register(automation, notify) for automation in declared]


def _register(declared: dict[str, Any], notify: str | None) -> str:
    subject = declared.pop("subject")
    automation = TypeAdapter(Automation).validate_python(
        {**declared, "actions": [_action(subject, notify)]}
    )
    try:
        existing = cast(Automation, Automation.read(name=automation.name))
    except ValueError:
        automation.create()
    else:
        automation.model_copy(update={"id": existing.id, "enabled": existing.enabled}).update()
    return automation.name


def _action(subject: str, notify: str | None) -> dict[str, str]:
    if notify is None:
        return {"type": "do-nothing"}
    try:
        block = cast(Block, Block.load(notify))
    except ValueError as error:
        raise NotDeployed(
            f"There is no notification block {notify} on the server ({error}). Make it on the page "
            "Blocks, or leave NOTIFY out."
        ) from None
    return {
        "type": "send-notification",
        "block_document_id": str(block._block_document_id),
        "subject": subject,
        "body": MESSAGE,
    }


def recipe(name: str, settings: dict[str, Any] | None = None, flow: str = "grpo") -> dict[str, Any]:
    """A recipe for a flow, checked and complete, as `config`; `settings` are changes by dotted name.

    Complete, so that the form shows every value of the run, and a later change of a default needs
    a new `make deploy` to take effect. Runs work in the folder that is deployed from, `directory`.
    """
    words = words_of(settings or {})
    config = _without_credentials(load_recipe(settings_class(load_flow(flow)), name, words))
    return {"config": config.model_dump(mode="json"), "directory": str(Path.cwd())}


def _without_credentials(config: GRPOConfig) -> GRPOConfig:
    """The settings, which Prefect stores and shows. ConfigError where they hold a credential."""
    if fault := credential_sentence(config):
        raise ConfigError(fault)
    return config


def here() -> dict[str, str]:
    """For flows that take no recipe: runs work in the folder that is deployed from, `directory`."""
    return {"directory": str(Path.cwd())}


def work_in(directory: str) -> dict[str, str]:
    """A pull step: the flow works in this folder and may import modules that are there.

    Prefect's own step `set_working_directory` does the first alone.
    """
    os.chdir(directory)
    import_from_working_folder()
    return {"directory": os.getcwd()}
