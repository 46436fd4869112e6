"""Registering work pool, deployments and automations on a Prefect server."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
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
from configs.deployments import words_of
from configs.environment import import_from_working_folder
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from tasks.launch.deployment_file import Deployments, own_flow_variables
from tasks.launch.server import ServerError
from tasks.run.run_record import load_flow, settings_class

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
    for left in reversed(range(ATTEMPTS)):
        try:
            return register()
        except httpx.TransportError as error:
            if not left:
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


def register_deployments(found: Deployments) -> None:
    """All of these, by Prefect's own command."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prefect.yaml"
        file.write_text(yaml.safe_dump(found.file, sort_keys=False))
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
    return [_register(one, notify) for one in declared]


def _register(declared: dict[str, Any], notify: str | None) -> str:
    subject = declared.pop("subject")
    wanted = TypeAdapter(Automation).validate_python(
        {**declared, "actions": [_action(subject, notify)]}
    )
    try:
        found = cast(Automation, Automation.read(name=wanted.name))
    except ValueError:
        wanted.create()
    else:
        wanted.model_copy(update={"id": found.id, "enabled": found.enabled}).update()
    return wanted.name


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
    if said := credential_sentence(config):
        raise ConfigError(said)
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
