"""What a run's page in MLflow is made of: metrics by names that it takes, models, the machine."""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from storage.tracking.machine_samples import MachineSample
from storage.tracking.plots import REWARD_MEAN

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

_logger = logging.getLogger(__name__)

# MLflow 3.17 sorts the charts of a run's page by name, capitals first: this one of reward/mean leads.
FIRST = "Overview/reward"
MODEL_TYPE = "policy"
_NOT_IN_MODEL_NAMES = re.compile(r"[/:.%\"']")
KEPT = 10_000  # values of a machine's metrics that wait while MLflow is away: some hours of them
_NAME_CHARACTERS = 250  # MLflow's limit for the name of a metric


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
    known = known_model(client, run, version, tags["refrain.digest"])
    if known is not None:
        return known
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
    found = client.search_logged_models(
        [run.info.experiment_id],
        f"source_run_id = '{run.info.run_id}' AND tags.`refrain.version` = '{version}'",
    )
    return next((one for one in found if one.tags.get("refrain.digest") == digest), None)


def finished(client: MlflowClient, run: Run, model: LoggedModel, step: int) -> None:
    """Say that a model has what belongs to it, and that the run made it; once."""
    from mlflow.entities import LoggedModelOutput

    if str(model.status) != "READY":
        client.finalize_logged_model(model.model_id, "READY")
    outputs = client.get_run(run.info.run_id).outputs
    made = [] if outputs is None else [one.model_id for one in outputs.model_outputs]
    if model.model_id not in made:
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
                    for one in self.monitors:
                        one.clear_metrics()

    logging.getLogger("mlflow.system_metrics").setLevel(logging.ERROR)  # of GPUs that are not there
    monitor = Monitor(run_id, sampling_interval=every, resume_logging=resumed, tracking_uri=uri)
    monitor.start()
    return monitor
