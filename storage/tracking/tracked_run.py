"""What a run's page in MLflow says of the run and its data, and how: as parameters and tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from storage.objects.json_values import JsonValue

RUN_TAG = "refrain.run"
STORE_TAG = "refrain.store"
LONGEST_PARAM = 500  # characters of a setting shown among the parameters; config.yaml has it whole


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedData:
    """The data set, as MLflow shows it among a run's inputs."""

    name: str
    digest: str  # sha256:<hex>
    source: Mapping[str, JsonValue]  # settings of the source
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a run's page says about it."""

    run: str  # name of the run in the store
    store_uri: str
    settings: Mapping[str, JsonValue]  # the resolved configuration
    data: TrackedData
    model_name: str  # name in the model registry, where the settings give none
    flow_run_id: str | None = None  # of Prefect
    flow_run_url: str | None = None  # of its page on Prefect's dashboard
    forked_from: str | None = None  # run in the same store that this one continues from
    forked_at: int | None = None  # its step
    rollback: str | None = None  # why a guard had it go on from there; None: a person did
    git_commit: str | None = None  # of the working folder


def flatten(settings: Mapping[str, JsonValue], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names and short text; lists as JSON."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            short = text if len(text) <= LONGEST_PARAM else f"{text[: LONGEST_PARAM - 1]}…"
            flat[f"{prefix}{key}"] = short
    return flat


def tags_of(tracked: TrackedRun) -> dict[str, str]:
    """The tags of the run's page."""
    tags = {
        RUN_TAG: tracked.run,
        STORE_TAG: tracked.store_uri,
        "refrain.forked_from": tracked.forked_from,
        "refrain.forked_at": None if tracked.forked_at is None else str(tracked.forked_at),
        "refrain.rollback": tracked.rollback,
        "prefect.flow_run_id": tracked.flow_run_id,
        "prefect.flow_run_url": tracked.flow_run_url,
        "mlflow.source.name": "refrain",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": tracked.git_commit,
    }
    if tracked.flow_run_url is not None:
        tags["mlflow.note.content"] = f"[Prefect flow run]({tracked.flow_run_url})"
    return {name: value for name, value in tags.items() if value is not None}
