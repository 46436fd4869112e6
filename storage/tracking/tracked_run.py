"""What a run's page in MLflow says of the run and its data, and how: as parameters and tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from storage.objects.documents import JsonValue

RUN_TAG = "refrain.run"
STORE_TAG = "refrain.store"
RECORD_TAG = "refrain.record"  # of a run's page; see TrackedRun.record
VERSION_TAG = "refrain.version"  # of a model and a registered version, as the next two
DIGEST_TAG = "refrain.digest"
URI_TAG = "refrain.uri"
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
    # Digest of the run's own record in its store, which stays what it is wherever the store is moved;
    # None: the run is known by its name and its store alone.
    record: str | None = None
    parent_record: str | None = None  # the same of forked_from
    # store.options, by which versions that are registered are read
    store_options: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedEvaluation:
    """What a suite says of a policy version."""

    version: int
    weights_digest: str  # of the version
    suite: str
    rows_digest: str  # of rows and manner: only evaluations with the same one can be compared
    metrics: Mapping[str, float]  # eval/SUITE/…
    at: float  # seconds since 1970


_DIGEST_CHARACTERS = 36  # MLflow's limit for the digest of a dataset


def short_digest(digest: str) -> str:
    """A digest as MLflow takes it for a dataset: the hex digits after its kind, so many of them."""
    return digest.rpartition(":")[2][:_DIGEST_CHARACTERS]


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
        RECORD_TAG: tracked.record,
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
