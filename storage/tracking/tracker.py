"""The run's page in MLflow: parameters, metrics, plots, data, and the policy versions it made.

Only the flow process uses it, with one tracker for a run. MLflow is imported when a tracker starts,
never before: that takes seconds, and so does the first migration of a new SQLite database.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import yaml

from configs.optional_packages import pip_install
from configs.storage import TrackingConfig
from storage.objects.json_values import JsonValue
from storage.tracking.connection import (
    TrackingAddress,
    TrackingError,
    as_tracking_errors,
    has_pages,
)
from storage.tracking.mlflow_entities import logged_model, shown_metrics, watched_machine
from storage.tracking.registered_versions import RegisteredVersion, tag_removed, versions_of
from storage.tracking.tracked_run import (
    RUN_TAG,
    STORE_TAG,
    TrackedData,
    TrackedRun,
    flatten,
    tags_of,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

_PARAMS_PER_CALL = 100  # MLflow's limit
_DIGEST_CHARACTERS = 36  # MLflow's limit for the digest of a dataset

LAST_STEP_TAG = "refrain.last_step"
# The kind is a tag of the experiment; the pages of 3.17 go by the address instead.
KIND_TAG, KIND = "mlflow.experimentKind", "custom_model_development"
UI_ADDRESS = "http://127.0.0.1:5000"  # of `mlflow ui`, unless it is told another
CURVES = "/model-metrics?workflowType=machine_learning"  # of a run's address


class Tracker:
    """One run in MLflow. Safe to use from several threads once it has started.

    As a context it ends the run by itself: FINISHED, KILLED on Ctrl-C and cancellation, else FAILED.
    Every method raises TrackingError when MLflow fails.
    """

    def __init__(self, config: TrackingConfig) -> None:
        """ValueError when the address is none that MLflow can use. Imports and opens nothing."""
        self._config = config
        self._place = TrackingAddress.of(config.uri)
        self._lock = Lock()
        self._client: MlflowClient | None = None
        self._run: Run | None = None
        self._model_name = config.registered_model
        self._last_step: int | None = None
        self._machine: SystemMetricsMonitor | None = None

    def start(self, tracked: TrackedRun) -> None:
        """Begin the run's page, or go on with it when this run has one."""
        with as_tracking_errors(self._place.uri):
            self._client = self._place.connect()
            self._model_name = self._config.registered_model or tracked.model_name
            experiment = self._experiment()
            self._run = self._find(experiment, tracked.run, tracked.store_uri)
            tags = tags_of(tracked)
            if tracked.forked_from is not None:
                parent = self._find(experiment, tracked.forked_from, tracked.store_uri)
                if parent is not None:
                    tags["mlflow.parentRunId"] = parent.info.run_id
            if self._run is None:
                self._run = self._client.create_run(experiment, tags=tags, run_name=tracked.run)
            else:
                last_step = self._run.data.tags.get(LAST_STEP_TAG)
                self._last_step = None if last_step is None else int(last_step)
                self._client.update_run(self.run_id, status="RUNNING")
                for key, value in tags.items():
                    self._client.set_tag(self.run_id, key, value)
            self._log_settings(tracked.settings)
            self._log_data(tracked.data)
        if self._config.system_metrics and self._machine is None:
            resumed = self._last_step is not None
            every = self._config.system_metrics
            self._machine = watched_machine(self.run_id, self._place.uri, every, resumed)

    def reopen(self, run: str, store_uri: str) -> bool:
        """Go on with the page of a run as it stands, to record more; False where it has none."""
        with as_tracking_errors(self._place.uri):
            self._client = self._place.connect()
            self._run = self._find(self._experiment(), run, store_uri)
        return self._run is not None

    @property
    def run_id(self) -> str:
        """MLflow's id of the run."""
        assert self._run is not None, "start() comes first"
        return self._run.info.run_id

    @property
    def link(self) -> str:
        """Where a person sees the run: a page of the server, or the command that shows it."""
        assert self._run is not None, "start() comes first"
        page = f"/#/experiments/{self._run.info.experiment_id}/runs/{self.run_id}{CURVES}"
        if self._place.uri.startswith("http"):
            return self._place.uri.rstrip("/") + page
        needs = "" if has_pages() else f" (needs {pip_install('mlflow')})"
        return f"mlflow ui --backend-store-uri {self._place.uri}{needs}, then {UI_ADDRESS}{page}"

    @property
    def last_step(self) -> int | None:
        """The last step whose metrics are recorded: a resumed run logs the later ones again."""
        return self._last_step

    def log_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        at: float,
        lineage: Mapping[str, str] | None = None,
    ) -> None:
        """Record a step's metrics, and then the step's number, which a death may leave unwritten.

        `at`: when the step was committed, in seconds since 1970. MLflow keeps a value once for a
        step and a time, so a step may be recorded again. `lineage`: tags of the run that say what
        its newest version is made of.
        """
        self.log_metrics(step, metrics, at=at, tags={LAST_STEP_TAG: str(step), **(lineage or {})})
        self._last_step = step

    def log_metrics(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        at: float,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Record metrics at a step, and tags of the run; `at`: seconds since 1970."""
        from mlflow.entities import Metric, RunTag

        moment = int(at * 1000)
        values = [
            Metric(name, value, moment, step) for name, value in shown_metrics(metrics).items()
        ]
        given = [RunTag(name, value) for name, value in (tags or {}).items()]
        with as_tracking_errors(self._place.uri):
            self._started.log_batch(self.run_id, metrics=values, tags=given)

    def log_file(self, name: str, content: bytes | str) -> None:
        """Keep a file with the run, such as plots/progress.png; an older one is replaced."""
        folder, _, filename = name.rpartition("/")
        with tempfile.TemporaryDirectory() as scratch, as_tracking_errors(self._place.uri):
            path = Path(scratch, filename)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
            self._started.log_artifact(self.run_id, str(path), folder or None)

    def register_version(
        self,
        version: int,
        *,
        uri: str,
        digest: str,
        step: int,
        store_uri: str,
        lineage: Mapping[str, str] | None = None,
    ) -> str:
        """Register a policy version of the store; its number in the registry.

        `lineage`: tags that say what it was made of.

        Registering the same version again finds the first registration. MLflow itself keeps the
        alias `latest`: models:/<name>@latest is the version registered last.
        """
        from mlflow.exceptions import MlflowException

        assert self._model_name is not None, "start() comes first"
        name, client = self._model_name, self._started
        tags = {
            "refrain.version": str(version),
            "refrain.step": str(step),
            "refrain.digest": digest,
            "refrain.uri": uri,
            STORE_TAG: store_uri,
        }
        with self._lock, as_tracking_errors(self._place.uri):
            try:
                client.create_registered_model(name, tags={"refrain": "policy"})
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            for known in client.search_model_versions(
                f"name = '{name}' and run_id = '{self.run_id}'"
            ):
                if {**known.tags, **tags} == known.tags:
                    return str(known.version)
            # A server refuses a local path outside of the run's own artifacts: hide that it is one.
            remote = self._place.database is None
            source = f"refrain-{uri}" if remote and uri.startswith("file:") else uri
            tags = {**(lineage or {}), **tags}
            assert self._run is not None
            model_id = logged_model(client, self._run, version, step, tags)
            made = client.create_model_version(
                name, source, self.run_id, tags=tags, model_id=model_id
            )
            return str(made.version)

    def registered(self) -> dict[int, str]:
        """Policy version -> its number in the registry, of those that this run has registered."""
        with as_tracking_errors(self._place.uri):
            found = self._started.search_model_versions(
                f"name = '{self.model_name}' and run_id = '{self.run_id}'"
            )
        return {int(one.tags["refrain.version"]): str(one.version) for one in found}

    def registered_versions(self) -> list[RegisteredVersion]:
        """What the registry says of the policy versions of this run, aliases included."""
        with as_tracking_errors(self._place.uri):
            return versions_of(self._started, self.run_id)

    def tag_removed(self, versions: Collection[int]) -> None:
        """Have the registry say that these policy versions are no longer in the store."""
        with as_tracking_errors(self._place.uri):
            tag_removed(self._started, versions_of(self._started, self.run_id), versions)

    @property
    def model_name(self) -> str:
        """Name of the run's model in the registry."""
        assert self._model_name is not None, "start() comes first"
        return self._model_name

    def tag(self, name: str, value: str) -> None:
        """Write a tag on the run's page."""
        with as_tracking_errors(self._place.uri):
            self._started.set_tag(self.run_id, name, value)

    def finish(self, status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED") -> None:
        """End the run's page. A later start() of the same run goes on with it."""
        if self._machine is not None:
            self._machine.finish()
            self._machine = None
        with as_tracking_errors(self._place.uri):
            self._started.set_terminated(self.run_id, status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._run is None:
            return
        if kind is None:
            self.finish()
        else:
            self.finish("FAILED" if issubclass(kind, Exception) else "KILLED")

    @property
    def _started(self) -> MlflowClient:
        assert self._client is not None, "start() comes first"
        return self._client

    def _experiment(self) -> str:
        """Id of the experiment, made when there is none."""
        from mlflow.exceptions import MlflowException

        client, name = self._started, self._config.experiment
        place = None
        if self._place.database is not None:
            # MLflow's own default is ./mlruns, wherever a run is started.
            place = (self._place.database.parent / "mlartifacts" / name).as_uri()
        if (known := client.get_experiment_by_name(name)) is None:
            try:
                return client.create_experiment(
                    name, artifact_location=place, tags={KIND_TAG: KIND}
                )
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                known = client.get_experiment_by_name(name)
        if known is None or known.lifecycle_stage != "active":
            raise TrackingError(
                f"The MLflow experiment {name} has been deleted. Restore it, or set "
                "tracking.experiment to another name."
            )
        if KIND_TAG not in known.tags:  # made by an older Refrain
            client.set_experiment_tag(known.experiment_id, KIND_TAG, KIND)
        return known.experiment_id

    def _find(self, experiment: str, run: str, store_uri: str) -> Run | None:
        found = self._started.search_runs(
            [experiment],
            f"tags.`{RUN_TAG}` = '{run}' and tags.`{STORE_TAG}` = '{store_uri}'",
            max_results=1,
        )
        return found[0] if found else None

    def _log_settings(self, settings: Mapping[str, JsonValue]) -> None:
        """Settings as parameters. One that differs from the page's is left: MLflow's parameters are
        final, and config.yaml holds the newest."""
        from mlflow.entities import Param

        assert self._run is not None
        known = self._run.data.params
        params = [
            Param(name, value) for name, value in flatten(settings).items() if name not in known
        ]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self._started.log_batch(self.run_id, params=params[start : start + _PARAMS_PER_CALL])
        self.log_file("config.yaml", yaml.safe_dump(dict(settings), sort_keys=False))

    def _log_data(self, data: TrackedData) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        digest = data.digest.rpartition(":")[2][:_DIGEST_CHARACTERS]
        dataset = Dataset(
            name=data.name,
            digest=digest,
            source_type="refrain",
            source=json.dumps(data.source),
            profile=json.dumps({"rows": data.rows, "digest": data.digest}),
        )
        tags = [InputTag("mlflow.data.context", "training")]
        self._started.log_inputs(self.run_id, [DatasetInput(dataset, tags)])
