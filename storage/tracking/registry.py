"""Policy versions in MLflow's model registry: found by alias, judged, given an alias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage.tracking.connection import TrackingAddress
from storage.tracking.tracker import RUN_TAG, STORE_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from configs.storage import TrackingConfig

EVALUATION_TAG = "refrain.evaluation"  # mean held-out reward
EVALUATED_ON_TAG = "refrain.evaluated_on"  # digest of rows and manner of the evaluation
PROMOTION_TAG = "refrain.promotion"  # why the version was promoted, or was not


class NotRegistered(ValueError):
    """There is no such version; the message is one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """A policy version in the registry."""

    model: str
    number: str  # MLflow's
    run: str  # that made it
    step: int
    store_uri: str
    evaluation: float | None  # mean held-out reward, where it was measured
    evaluated_on: str | None


class Registry:
    """The model registry at a tracking address. Imports MLflow when it is opened."""

    def __init__(self, config: TrackingConfig) -> None:
        self._client: MlflowClient = TrackingAddress.of(config.uri).connect()

    def by_alias(self, model: str, alias: str) -> Registered | None:
        """The version that has an alias; None when none has."""
        from mlflow.exceptions import MlflowException

        try:
            entry = self._client.get_model_version_by_alias(model, alias)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise
        tags = entry.tags
        if entry.run_id is None or "refrain.step" not in tags:
            raise NotRegistered(
                f"models:/{model}@{alias} (version {entry.version}) was not registered by Refrain, "
                "so the run that made it is not known."
            )
        run = self._client.get_run(entry.run_id)
        evaluation = tags.get(EVALUATION_TAG)
        return Registered(
            model=model,
            number=str(entry.version),
            run=run.data.tags[RUN_TAG],
            step=int(tags["refrain.step"]),
            store_uri=tags[STORE_TAG],
            evaluation=None if evaluation is None else float(evaluation),
            evaluated_on=tags.get(EVALUATED_ON_TAG),
        )

    def tags(self, model: str, number: str) -> dict[str, str]:
        """The tags of a version."""
        return dict(self._client.get_model_version(model, number).tags)

    def tag(self, model: str, number: str, tags: Mapping[str, str]) -> None:
        """Write tags on a version."""
        for name, value in tags.items():
            self._client.set_model_version_tag(model, number, name, value)

    def give(self, model: str, alias: str, number: str) -> None:
        """Move an alias to a version."""
        self._client.set_registered_model_alias(model, alias, number)
