"""The run's page in MLflow: parameters, metrics, plots, data, and the policy versions it made.

Only the flow process uses it, with one tracker for a run. MLflow is imported when a tracker starts,
never before: that takes seconds, and so does the first migration of a new SQLite database.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import posixpath
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Literal

import yaml

from configs.environment import pip_install
from configs.storage import TrackingConfig
from storage.objects.documents import JsonValue
from storage.tracking.connection import (
    TrackingAddress,
    TrackingError,
    as_tracking_errors,
    has_pages,
)
from storage.tracking.machine_samples import MachineSample
from storage.tracking.plots import REWARD_MEAN
from storage.tracking.registry import (
    DIGEST_TAG,
    RECORD_TAG,
    RUN_TAG,
    STORE_TAG,
    URI_TAG,
    VERSION_TAG,
    RegisteredVersion,
    let_go,
    tag_removed,
    take_back,
    versions_of,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run, Span, TraceInfo
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

LONGEST_PARAM = 500  # characters of a setting shown among the parameters; config.yaml has it whole

LONGEST_TEXT = 16_000  # characters of a prompt or an answer in a trace; the store has them whole
PREVIEW = 1000  # MLflow's limit for what its list shows

_logger = logging.getLogger(__name__)

# MLflow 3.17 sorts the charts of a run's page by name, capitals first: this one of reward/mean leads.
FIRST = "Overview/reward"
MODEL_TYPE = "policy"
_NOT_IN_MODEL_NAMES = re.compile(r"[/:.%\"']")
KEPT = 10_000  # values of a machine's metrics that wait while MLflow is away: some hours of them
_NAME_CHARACTERS = 250  # MLflow's limit for the name of a metric

_PARAMS_PER_CALL, _METRICS_PER_CALL = 100, 1000  # MLflow's limits

LAST_STEP_TAG = "refrain.last_step"
OLD_TAGS = {"refrain.batch.last"}  # of older Refrains: keys of objects, which commits have
# The kind is a tag of the experiment; the pages of 3.17 go by the address instead.
KIND_TAG, KIND = "mlflow.experimentKind", "custom_model_development"
UI_ADDRESS = "http://127.0.0.1:5000"  # of `mlflow ui`, unless it is told another
CURVES = "/model-metrics?workflowType=machine_learning"  # of a run's address


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


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedSample:
    """A sample of a committed step."""

    sample: str  # its id
    step: int
    at: float  # when the step was committed, in seconds since 1970
    prompt: str
    response: str
    reward: float | None  # None: scoring failed
    tokens: int
    ending: str
    # Who wrote what of an episode, in order: policy, environment; of others nothing.
    parts: Sequence[tuple[str, str]] = ()
    more: Mapping[str, str] = field(default_factory=dict)  # shown as tags


def trace_of(sample: TracedSample, run_id: str, experiment: str) -> tuple[TraceInfo, list[Span]]:
    """A sample's trace. The same sample of the same run has the same ids, so that MLflow keeps one.

    run_id: MLflow's.
    """
    from mlflow.entities import (
        AssessmentSource,
        Feedback,
        TraceInfo,
        TraceLocation,
        TraceState,
    )

    number = _hex(f"{run_id} {sample.step} {sample.sample}", 32)
    trace_id, nanoseconds = f"tr-{number}", int(sample.at * 1e9)
    prompt, response = _short(sample.prompt), _short(sample.response)
    failed = sample.reward is None

    def span(name: str, kind: str, place: int, inputs: object, out: object) -> Span:
        attributes = {
            "mlflow.traceRequestId": trace_id,
            "mlflow.spanType": kind,
            "mlflow.spanInputs": inputs,
            "mlflow.spanOutputs": out,
        }
        return _span(number, name, place, nanoseconds, attributes, failed)

    spans = [span("sample", "LLM", 0, {"prompt": prompt}, {"response": response})]
    for place, (who, text) in enumerate(sample.parts, start=1):
        kind = "LLM" if who == "policy" else "TOOL"
        spans.append(span(who, kind, place, None, {"text": _short(text)}))
    reward = Feedback(
        name="reward",
        value=sample.reward,
        error=None if sample.reward is not None else "scoring failed",
        source=AssessmentSource(source_type="CODE", source_id="refrain"),
        create_time_ms=nanoseconds // 1_000_000,
        last_update_time_ms=nanoseconds // 1_000_000,
        trace_id=trace_id,
    )
    reward.assessment_id = f"a-{number}"
    info = TraceInfo(
        trace_id=trace_id,
        trace_location=TraceLocation.from_experiment_id(experiment),
        request_time=nanoseconds // 1_000_000,
        execution_duration=0,
        state=TraceState.ERROR if failed else TraceState.OK,
        request_preview=prompt[:PREVIEW],
        response_preview=response[:PREVIEW],
        client_request_id=sample.sample,
        trace_metadata={"mlflow.sourceRun": run_id, "mlflow.trace_schema.version": "3"},
        tags={
            "mlflow.traceName": f"step {sample.step}",
            "refrain.step": str(sample.step),
            "refrain.tokens": str(sample.tokens),
            "refrain.ending": sample.ending,
            **sample.more,
        },
        assessments=[reward],
    )
    return info, spans


def _span(
    number: str, name: str, place: int, at: int, attributes: Mapping[str, object], failed: bool
) -> Span:
    """A span by its place in the trace; all but the first are below it. at: nanoseconds since 1970.

    As MLflow reads one that it has stored: its other ways to make one choose ids themselves.
    """
    from mlflow.entities import Span

    root = _hex(f"{number} 0", 16)
    return Span.from_dict(
        {
            "name": name,
            "trace_id": f"tr-{number}",
            "span_id": _hex(f"{number} {place}", 16),
            "parent_span_id": root if place else None,
            "start_time_unix_nano": at,
            "end_time_unix_nano": at,
            "status": {"code": "ERROR" if failed else "OK", "message": ""},
            "attributes": {key: json.dumps(value) for key, value in attributes.items()},
            "events": [],
        }
    )


def _short(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"


def _hex(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def shown_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics under names that MLflow takes, and its mean reward as FIRST too."""
    first = {FIRST: metrics[REWARD_MEAN]} if REWARD_MEAN in metrics else {}
    return {shown_name(name): float(value) for name, value in {**first, **metrics}.items()}


def machine_metrics(sample: MachineSample) -> dict[str, float]:
    """A machine's metrics by the names under which MLflow's pages show those of a system."""
    host = sample.host.replace("/", "_")
    return {shown_name(f"system/{host}/{name}"): value for name, value in sample.metrics.items()}


def shown_name(name: str) -> str:
    """A metric's name as MLflow takes it: `_` for other signs; users' functions name metrics too."""
    allowed = re.sub(r"[^/\w.\- :]", "_", name)[:_NAME_CHARACTERS]
    if posixpath.normpath(allowed) != allowed or allowed.startswith((".", "/")):  # read as a path
        return re.sub(r"[./]", "_", allowed)
    return allowed


def logged_model(
    client: MlflowClient, run: Run, version: int, step: int, tags: Mapping[str, str]
) -> LoggedModel:
    """A policy version as a model of the run, made when there is none; `finished` ends its making.

    Its tags are those of the registered version, its parameters the run's.
    """
    model = known_model(client, run, version, tags["refrain.digest"])
    if model is not None:
        return model
    name = _NOT_IN_MODEL_NAMES.sub("-", f"{run.info.run_name}-v{version}")
    return client.create_logged_model(
        run.info.experiment_id,
        name,
        run.info.run_id,
        tags=dict(tags),
        params=dict(client.get_run(run.info.run_id).data.params),
        model_type=MODEL_TYPE,
    )


def known_model(client: MlflowClient, run: Run, version: int, digest: str) -> LoggedModel | None:
    """The model of the run that a policy version is, where there is one."""
    models = client.search_logged_models(
        [run.info.experiment_id],
        f"source_run_id = '{run.info.run_id}' AND tags.`refrain.version` = '{version}'",
    )
    return next((model for model in models if model.tags.get("refrain.digest") == digest), None)


def finished(client: MlflowClient, run: Run, model: LoggedModel, step: int) -> None:
    """Say that a model has what belongs to it, and that the run made it; once."""
    from mlflow.entities import LoggedModelOutput

    if str(model.status) != "READY":
        client.finalize_logged_model(model.model_id, "READY")
    outputs = client.get_run(run.info.run_id).outputs
    model_ids = [] if outputs is None else [output.model_id for output in outputs.model_outputs]
    if model.model_id not in model_ids:
        client.log_outputs(run.info.run_id, [LoggedModelOutput(model.model_id, step)])


def watched_machine(run_id: str, uri: str, every: int, resumed: bool) -> SystemMetricsMonitor:
    """MLflow's monitor, begun: it samples the machine of this process every so many seconds.

    `resumed`: the page has samples, after which these are counted.
    """
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    class Monitor(SystemMetricsMonitor):
        """MLflow's own loop reads the whole run before each sample, to see whether it has ended.

        That took an eighth of an idle flow's work; here finish() says so.
        """

        def monitor(self) -> None:
            self.collect_metrics()  # what is used per interval begins here
            told = False  # that MLflow is away, once for each time that it is
            while not self._shutdown_event.wait(self.sampling_interval):
                try:
                    self.collect_metrics()
                    self.publish_metrics(self.aggregate_metrics())
                    told = False
                except Exception as error:  # its logger keeps what did not get through
                    if not told:
                        _logger.warning("Samples of this machine wait for MLflow: %s", error)
                    told = True
                    del self.mlflow_logger.data[:-KEPT]
                    self._logging_step += 1  # publish_metrics goes on so, where nothing fails
                    for probe in self.monitors:
                        probe.clear_metrics()

    logging.getLogger("mlflow.system_metrics").setLevel(logging.ERROR)  # of GPUs that are not there
    monitor = Monitor(run_id, sampling_interval=every, resume_logging=resumed, tracking_uri=uri)
    monitor.start()
    return monitor


class Tracker:
    """One run in MLflow. Safe to use from several threads once it has started.

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
        run_tags = [RunTag(name, value) for name, value in (tags or {}).items()]
        with as_tracking_errors(self._place.uri):
            self.client.log_batch(self.run_id, metrics=values, tags=run_tags)

    def log_machines(self, samples: Sequence[MachineSample]) -> None:
        """Record what machines of the run did, each metric as system/HOST/NAME.

        Steps are counted from the run's begin, one for each interval of tracking.system_metrics.
        """
        from mlflow.entities import Metric

        began, every = self._found.info.start_time / 1000, self.config.system_metrics or 1
        values = [
            Metric(name, value, int(sample.at * 1000), max(0, round((sample.at - began) / every)))
            for sample in samples
            for name, value in machine_metrics(sample).items()
        ]
        with as_tracking_errors(self._place.uri):
            for start in range(0, len(values), _METRICS_PER_CALL):
                self.client.log_batch(self.run_id, values[start : start + _METRICS_PER_CALL])

    def log_traces(self, samples: Sequence[TracedSample]) -> None:
        """Keep samples as traces of the run; those that are there already stay as they are."""
        from mlflow.tracing.client import TracingClient

        experiment, traces = self._found.info.experiment_id, TracingClient(self._place.uri)
        with as_tracking_errors(self._place.uri):
            for info, spans in [trace_of(sample, self.run_id, experiment) for sample in samples]:
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
            for entry in self._own_versions():
                if (entry.tags[VERSION_TAG], entry.tags.get(DIGEST_TAG)) == (str(version), digest):
                    return str(entry.version)
            model = logged_model(client, self._found, version, step, tags)
            source = self.place_files(model, uri)
            finished(client, self._found, model, step)
            values = [
                Metric(metric, value, int(at * 1000), step, model.model_id)
                for metric, value in shown_metrics(metrics or {}).items()
            ]
            client.log_batch(self.run_id, metrics=values)
            for evaluation in evaluations:
                self._log_evaluation(evaluation, model.model_id)
            registered = client.create_model_version(
                name, source, self.run_id, tags=tags, model_id=model.model_id
            )
            return str(registered.version)

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
            return {
                int(entry.tags[VERSION_TAG]): str(entry.version) for entry in self._own_versions()
            }

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
        if (experiment := client.get_experiment_by_name(name)) is None:
            try:
                return client.create_experiment(
                    name, artifact_location=place, tags={KIND_TAG: KIND}
                )
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                experiment = client.get_experiment_by_name(name)
        if experiment is None or experiment.lifecycle_stage != "active":
            raise TrackingError(
                f"The MLflow experiment {name} has been deleted. Restore it, or set "
                "tracking.experiment to another name."
            )
        if KIND_TAG not in experiment.tags:  # made by an older Refrain
            client.set_experiment_tag(experiment.experiment_id, KIND_TAG, KIND)
        return experiment.experiment_id

    def _find(self, experiment: str, run: str, store_uri: str, record: str | None) -> Run | None:
        """The run's page: by its record, which goes with a store that is moved, else by the store.

        run: its name. record: as TrackedRun.record; None where it is not known.
        """
        for name, value in ((RECORD_TAG, record), (STORE_TAG, store_uri)):
            if value is None:
                continue
            pages = self.client.search_runs(
                [experiment],
                f"tags.`{RUN_TAG}` = '{run}' and tags.`{name}` = '{value}'",
                max_results=1,
            )
            # A page of that name and store may be of a run that was there before.
            if pages and record in (None, pages[0].data.tags.get(RECORD_TAG, record)):
                return pages[0]
        return None

    def _move(self, before: str, now: str) -> None:
        """Say where the run's versions lie since its store was moved.

        A registered version's source is final: it goes on naming the place where it was registered.
        """
        client = self.client
        for entry in self._own_versions():
            if entry.tags.get(STORE_TAG) == before:
                uri = now + entry.tags[URI_TAG].removeprefix(before)
                number, digest = int(entry.tags[VERSION_TAG]), entry.tags.get(DIGEST_TAG, "")
                if (model := known_model(client, self._found, number, digest)) is not None:
                    with contextlib.suppress(TrackingError):  # its files may be gone by now
                        self.place_files(model, uri)
                for name, value in ((URI_TAG, uri), (STORE_TAG, now)):
                    client.set_model_version_tag(entry.name, entry.version, name, value)

    def _log_settings(self, settings: Mapping[str, JsonValue]) -> None:
        """Settings as parameters. One that differs from the page's is left: MLflow's parameters are
        final, and config.yaml holds the newest."""
        from mlflow.entities import Param

        logged = self._found.data.params
        params = [
            Param(name, value) for name, value in flatten(settings).items() if name not in logged
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
