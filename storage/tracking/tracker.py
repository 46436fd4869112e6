"""The run's page in MLflow: parameters, metrics, plots, data, and the policy versions it made.

Only the flow process uses it, with one tracker for a run. MLflow is imported when a tracker starts,
never before: that takes seconds, and so does the first migration of a new SQLite database.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import yaml

from configs.optional_packages import pip_install
from configs.storage import TrackingConfig
from storage.objects.documents import JsonValue
from storage.tracking.connection import (
    TrackingAddress,
    TrackingError,
    as_tracking_errors,
    has_pages,
)
from storage.tracking.machine_samples import MachineSample
from storage.tracking.mlflow_entities import (
    finished,
    known_model,
    logged_model,
    machine_metrics,
    shown_metrics,
    watched_machine,
)
from storage.tracking.registered_versions import (
    RegisteredVersion,
    let_go,
    tag_removed,
    take_back,
    versions_of,
)
from storage.tracking.traces import TracedSample, trace_of
from storage.tracking.tracked_run import (
    DIGEST_TAG,
    RECORD_TAG,
    RUN_TAG,
    STORE_TAG,
    URI_TAG,
    VERSION_TAG,
    TrackedData,
    TrackedEvaluation,
    TrackedRun,
    flatten,
    short_digest,
    tags_of,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

_PARAMS_PER_CALL, _METRICS_PER_CALL = 100, 1000  # MLflow's limits

LAST_STEP_TAG = "refrain.last_step"
OLD_TAGS = {"refrain.batch.last"}  # of older Refrains: keys of objects, which commits have
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
        self.config = config
        self._place = TrackingAddress.of(config.uri)
        self._lock = Lock()
        self._client: MlflowClient | None = None
        self._run: Run | None = None
        self._tracked: TrackedRun | None = None
        self._model_name = config.registered_model
        self._last_step: int | None = None
        self._machine: SystemMetricsMonitor | None = None

    def start(self, tracked: TrackedRun) -> None:
        """Begin the run's page, or go on with it when this run has one."""
        self._tracked = tracked
        with as_tracking_errors(self._place.uri):
            self._client = self._place.connect()
            self._model_name = self.config.registered_model or tracked.model_name
            experiment = self._experiment()
            self._run = self._find(experiment, tracked.run, tracked.store_uri, tracked.record)
            tags = tags_of(tracked)
            if tracked.forked_from is not None:
                parent = self._find(
                    experiment, tracked.forked_from, tracked.store_uri, tracked.parent_record
                )
                if parent is not None:
                    tags["mlflow.parentRunId"] = parent.info.run_id
            if self._run is None:
                self._run = self._client.create_run(experiment, tags=tags, run_name=tracked.run)
            else:
                last_step = self._run.data.tags.get(LAST_STEP_TAG)
                self._last_step = None if last_step is None else int(last_step)
                self._client.update_run(self.run_id, status="RUNNING")
                if self._run.data.tags.get(STORE_TAG) != tracked.store_uri:
                    self._move(self._run.data.tags.get(STORE_TAG, ""), tracked.store_uri)
                for key, value in tags.items():
                    self._client.set_tag(self.run_id, key, value)
                for key in OLD_TAGS & set(self._run.data.tags):
                    self._client.delete_tag(self.run_id, key)
            self._log_settings(tracked.settings)
            self._log_data(tracked.data)
        if self.config.system_metrics and self._machine is None:
            resumed = self._last_step is not None
            every = self.config.system_metrics
            self._machine = watched_machine(self.run_id, self._place.uri, every, resumed)

    def reopen(self, run: str, store_uri: str, record: str | None = None) -> bool:
        """Go on with the page of a run as it stands, to record more; False where it has none.

        `record`: as TrackedRun.record.
        """
        with as_tracking_errors(self._place.uri):
            self._client = self._place.connect()
            self._run = self._find(self._experiment(), run, store_uri, record)
        return self._run is not None

    @property
    def _found(self) -> Run:
        assert self._run is not None, "start() comes first"
        return self._run

    @property
    def run_id(self) -> str:
        """MLflow's id of the run."""
        return self._found.info.run_id

    @property
    def link(self) -> str:
        """Where a person sees the run: a page of the server, or the command that shows it."""
        page = f"/#/experiments/{self._found.info.experiment_id}/runs/{self.run_id}{CURVES}"
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
            self.client.log_batch(self.run_id, metrics=values, tags=given)

    def log_machines(self, samples: Sequence[MachineSample]) -> None:
        """Record what machines of the run did, each metric as system/HOST/NAME.

        Steps are counted from the run's begin, one for each interval of tracking.system_metrics.
        """
        from mlflow.entities import Metric

        began, every = self._found.info.start_time / 1000, self.config.system_metrics or 1
        values = [
            Metric(name, value, int(one.at * 1000), max(0, round((one.at - began) / every)))
            for one in samples
            for name, value in machine_metrics(one).items()
        ]
        with as_tracking_errors(self._place.uri):
            for start in range(0, len(values), _METRICS_PER_CALL):
                self.client.log_batch(self.run_id, values[start : start + _METRICS_PER_CALL])

    def log_traces(self, samples: Sequence[TracedSample]) -> None:
        """Keep samples as traces of the run; those that are there already stay as they are."""
        from mlflow.tracing.client import TracingClient

        experiment, traces = self._found.info.experiment_id, TracingClient(self._place.uri)
        with as_tracking_errors(self._place.uri):
            for info, spans in [trace_of(one, self.run_id, experiment) for one in samples]:
                traces.start_trace(info)
                traces.log_spans(experiment, spans)

    def log_file(self, name: str, content: bytes | str) -> None:
        """Keep a file with the run, such as plots/progress.png; an older one is replaced."""
        folder, _, filename = name.rpartition("/")
        with tempfile.TemporaryDirectory() as scratch, as_tracking_errors(self._place.uri):
            path = Path(scratch, filename)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
            self.client.log_artifact(self.run_id, str(path), folder or None)

    def log_evaluation(self, evaluated: TrackedEvaluation) -> None:
        """Record what a suite says of a policy version: at the version's number, and as the
        metrics of its model, if it is one by now."""
        with as_tracking_errors(self._place.uri):
            model = known_model(
                self.client, self._found, evaluated.version, evaluated.weights_digest
            )
            self._log_evaluation(evaluated, None if model is None else model.model_id)

    def _log_evaluation(self, evaluated: TrackedEvaluation, model: str | None) -> None:
        from mlflow.entities import Metric

        moment, digest = int(evaluated.at * 1000), short_digest(evaluated.rows_digest)
        values = [
            Metric(name, value, moment, evaluated.version, model, evaluated.suite, digest)
            for name, value in shown_metrics(evaluated.metrics).items()
        ]
        self.client.log_batch(self.run_id, metrics=values)

    def register_version(
        self,
        version: int,
        *,
        uri: str,
        digest: str,
        step: int,
        store_uri: str,
        lineage: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        at: float = 0.0,
        evaluations: Sequence[TrackedEvaluation] = (),
    ) -> str:
        """Register a policy version of the store; its number in the registry.

        `lineage`: tags that say what it was made of. `metrics`: of its step, committed `at` so many
        seconds since 1970, which with its evaluations are those of the model.

        Registering the same version again finds the first registration. MLflow itself keeps the
        alias `latest`: models:/<name>@latest is the version registered last.
        """
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        name, client = self.model_name, self.client
        tags = {
            **(lineage or {}),
            VERSION_TAG: str(version),
            "refrain.step": str(step),
            DIGEST_TAG: digest,
            URI_TAG: uri,
            STORE_TAG: store_uri,
        }
        with self._lock, as_tracking_errors(self._place.uri):
            try:
                client.create_registered_model(name, tags={"refrain": "policy"})
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            for known in self._own_versions():
                if (known.tags[VERSION_TAG], known.tags.get(DIGEST_TAG)) == (str(version), digest):
                    return str(known.version)
            model = logged_model(client, self._found, version, step, tags)
            source = self.place_files(model, uri)
            finished(client, self._found, model, step)
            values = [
                Metric(metric, value, int(at * 1000), step, model.model_id)
                for metric, value in shown_metrics(metrics or {}).items()
            ]
            client.log_batch(self.run_id, metrics=values)
            for one in evaluations:
                self._log_evaluation(one, model.model_id)
            made = client.create_model_version(
                name, source, self.run_id, tags=tags, model_id=model.model_id
            )
            return str(made.version)

    def place_files(self, model: LoggedModel, uri: str) -> str:
        """Where MLflow finds a version's files, which lie at `uri`: the source in the registry.

        Here nothing is put anywhere; tasks/reporting/registered_files.py does.
        """
        # A server refuses a local path outside of the model's own artifacts: hide that it is one.
        remote = self._place.database is None
        return f"refrain-{uri}" if remote and uri.startswith("file:") else uri

    def _own_versions(self) -> list[ModelVersion]:
        """What this run has registered."""
        return list(
            self.client.search_model_versions(
                f"name = '{self.model_name}' and run_id = '{self.run_id}'"
            )
        )

    def registered(self) -> dict[int, str]:
        """Policy version -> its number in the registry, of those that this run has registered."""
        with as_tracking_errors(self._place.uri):
            return {int(one.tags[VERSION_TAG]): str(one.version) for one in self._own_versions()}

    def registered_versions(self) -> list[RegisteredVersion]:
        """What the registry says of the policy versions of this run, aliases included."""
        with as_tracking_errors(self._place.uri):
            return versions_of(self.client, self.run_id)

    def let_go(self, versions: Collection[int]) -> set[int]:
        """Those of these policy versions that may be removed: see registered_versions.let_go."""
        with as_tracking_errors(self._place.uri):
            return let_go(self.client, self.run_id, versions)

    def take_back(self, versions: Collection[int]) -> None:
        """Have the registry no longer say that these policy versions are about to be removed."""
        with as_tracking_errors(self._place.uri):
            take_back(self.client, versions_of(self.client, self.run_id), versions)

    def tag_removed(self, versions: Collection[int]) -> None:
        """Have the registry say that these policy versions are no longer in the store."""
        with as_tracking_errors(self._place.uri):
            tag_removed(self.client, versions_of(self.client, self.run_id), versions)

    @property
    def model_name(self) -> str:
        """Name of the run's model in the registry."""
        assert self._model_name is not None, "start() comes first"
        return self._model_name

    def tag(self, name: str, value: str) -> None:
        """Write a tag on the run's page."""
        with as_tracking_errors(self._place.uri):
            self.client.set_tag(self.run_id, name, value)

    def finish(self, status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED") -> None:
        """End the run's page. A later start() of the same run goes on with it."""
        if self._machine is not None:
            self._machine.finish()
            self._machine = None
        with as_tracking_errors(self._place.uri):
            self.client.set_terminated(self.run_id, status)

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
    def client(self) -> MlflowClient:
        """Of the place where the page is."""
        assert self._client is not None, "start() comes first"
        return self._client

    @property
    def tracked(self) -> TrackedRun:
        """What the page says about its run."""
        assert self._tracked is not None, "start() comes first"
        return self._tracked

    def _experiment(self) -> str:
        """Id of the experiment, made when there is none."""
        from mlflow.exceptions import MlflowException

        client, name = self.client, self.config.experiment
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

    def _find(self, experiment: str, run: str, store_uri: str, record: str | None) -> Run | None:
        """The run's page: by its record, which goes with a store that is moved, else by the store."""
        for name, value in ((RECORD_TAG, record), (STORE_TAG, store_uri)):
            if value is None:
                continue
            found = self.client.search_runs(
                [experiment],
                f"tags.`{RUN_TAG}` = '{run}' and tags.`{name}` = '{value}'",
                max_results=1,
            )
            # A page of that name and store may be of a run that was there before.
            if found and record in (None, found[0].data.tags.get(RECORD_TAG, record)):
                return found[0]
        return None

    def _move(self, before: str, now: str) -> None:
        """Say where the run's versions lie since its store was moved.

        A registered version's source is final: it goes on naming the place where it was registered.
        """
        client = self.client
        for known in self._own_versions():
            if known.tags.get(STORE_TAG) == before:
                uri = now + known.tags[URI_TAG].removeprefix(before)
                number, digest = int(known.tags[VERSION_TAG]), known.tags.get(DIGEST_TAG, "")
                if (model := known_model(client, self._found, number, digest)) is not None:
                    with contextlib.suppress(TrackingError):  # its files may be gone by now
                        self.place_files(model, uri)
                for name, value in ((URI_TAG, uri), (STORE_TAG, now)):
                    client.set_model_version_tag(known.name, known.version, name, value)

    def _log_settings(self, settings: Mapping[str, JsonValue]) -> None:
        """Settings as parameters. One that differs from the page's is left: MLflow's parameters are
        final, and config.yaml holds the newest."""
        from mlflow.entities import Param

        known = self._found.data.params
        params = [
            Param(name, value) for name, value in flatten(settings).items() if name not in known
        ]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self.client.log_batch(self.run_id, params=params[start : start + _PARAMS_PER_CALL])
        self.log_file("config.yaml", yaml.safe_dump(dict(settings), sort_keys=False))

    def _log_data(self, data: TrackedData) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=data.name,
            digest=short_digest(data.digest),
            source_type="refrain",
            source=json.dumps(data.source),
            profile=json.dumps({"rows": data.rows, "digest": data.digest}),
        )
        tags = [InputTag("mlflow.data.context", "training")]
        self.client.log_inputs(self.run_id, [DatasetInput(dataset, tags)])
