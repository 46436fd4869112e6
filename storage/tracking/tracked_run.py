"""What a run's page in MLflow says of the run and its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storage.objects.json_values import JsonValue


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
