"""A team's file of deployments, deployment.yaml: which there are, with which settings, and when.

settings:                            # of every deployment, as on the command line
  tracking.uri: http://mlflow.example:5000
  store.uri: s3://bucket/refrain
deployments:
  - name: nightly                    # one that comes with Refrain, changed
    schedules: [{cron: "0 2 * * *", timezone: Europe/Berlin}]
  - name: sums                       # one of the team's own
    flow: grpo
    recipe: recipes/sums.yaml
    settings: {steps: 200}
    tags: [team-a]
    concurrency_limit: {limit: 1, collision_strategy: CANCEL_NEW}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from configs.base import Settings
from configs.overrides import ConfigError, read_settings, validate

DEFAULT_FILE = "deployment.yaml"  # in the folder that is deployed from
# What an entry has of Prefect's own, under its names: as in a prefect.yaml.
PREFECT_KEYS = (
    "version",
    "description",
    "tags",
    "parameters",
    "schedules",
    "concurrency_limit",
    "work_pool",
    "enforce_parameter_schema",
    "triggers",
    "sla",
)


class DeploymentEntry(Settings):
    """One deployment of the file."""

    name: str = Field(min_length=1, description="Name; one that comes with Refrain is changed.")
    flow: str | None = Field(
        None, description="grpo, ppo, …, or package.module:function of one of your own."
    )
    recipe: str | None = Field(
        None, description="Name or path of a recipe; none: that of the flow."
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Settings by dotted name, beside those of all."
    )
    version: str | None = Field(None, description="As Prefect has it; so are those below.")
    description: str | None = Field(None, description="Shown on the deployment's page.")
    tags: list[str] | None = Field(None, description="Tags of its runs.")
    parameters: dict[str, Any] | None = Field(
        None, description="Parameters of the flow besides config, such as resume."
    )
    schedules: list[dict[str, Any]] | None = Field(
        None, description="When it runs: cron or interval, timezone, active, slug, parameters."
    )
    concurrency_limit: int | dict[str, Any] | None = Field(
        None, description="Runs at once: limit, and collision_strategy ENQUEUE or CANCEL_NEW."
    )
    work_pool: dict[str, Any] | None = Field(
        None, description="Pool of workers: name, work_queue_name, job_variables."
    )
    enforce_parameter_schema: bool | None = Field(None, description="Refuse other parameters.")
    triggers: list[dict[str, Any]] | None = Field(None, description="Events that start a run.")
    sla: list[dict[str, Any]] | None = Field(None, description="Service levels.")

    def of_prefect(self) -> dict[str, Any]:
        """What it sets of Prefect's own."""
        return {key: getattr(self, key) for key in PREFECT_KEYS if key in self.model_fields_set}


class DeploymentFile(Settings):
    """The whole file."""

    settings: dict[str, Any] = Field(
        default_factory=dict, description="Settings of every deployment, by dotted name."
    )
    deployments: list[DeploymentEntry] = Field(
        min_length=1, description="Those that are registered; no others are."
    )


def read_deployments(path: Path) -> DeploymentFile:
    """The file; ConfigError says what is wrong with it."""
    raw = read_settings(path)
    try:
        file = validate(DeploymentFile, raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    names = [entry.name for entry in file.deployments]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{path} has two deployments of the name {twice[0]}. Rename one.")
    return file


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """Settings by dotted name as words key=value of a command line."""
    return [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in settings.items()
    ]
