"""The live run for Prometheus: its last committed step, as gauges at an address of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from configs.overrides import ConfigError
from configs.storage import TrackingConfig
from storage.runs.commit_log import Commit
from tasks.run.events import Listeners, RunBegan, RunEnded, StepCommitted
from tasks.run.metrics import numbers_of


class LiveMetrics:
    """Gauges of one run. Safe to use from several threads.

    refrain_metric has one series for each metric of the commits, so that whatever a step or a reward
    function measures is there without a change here.
    """

    def __init__(self, run: str, steps: int) -> None:
        self.registry = CollectorRegistry()
        self._run, self._names = run, set[str]()
        self._served = contextlib.ExitStack()
        self._metric = Gauge(
            "refrain_metric",
            "A metric of the last committed step, by its name in the commit.",
            ("run", "metric"),
            registry=self.registry,
        )
        self._step = self._gauge("refrain_step", "The last committed step.")
        self._at = self._gauge(
            "refrain_committed_timestamp_seconds", "When it was committed, since 1970."
        )
        self._gauge("refrain_steps_asked", "Steps that the run is to make.").labels(run).set(steps)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(name, meaning, ("run",), registry=self.registry)

    def listen(self, listeners: Listeners, config: TrackingConfig) -> None:
        """Hear what the run says; the gauges are served while a flow run has it."""

        def began(event: RunBegan) -> None:
            self._served.enter_context(self.served(config))
            if event.last is not None:
                self._show(event.last)

        listeners.on(RunBegan, began)
        listeners.on(StepCommitted, lambda event: self._show(event.record))
        listeners.on(RunEnded, lambda event: self._served.close())

    def _show(self, commit: Commit) -> None:
        self.committed(commit.step, commit.committed_at, numbers_of(commit))

    def committed(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        """A step was committed; a metric that it does not have is no longer shown."""
        for name in self._names - metrics.keys():
            self._metric.remove(self._run, name)
        self._names = set(metrics)
        for name, value in metrics.items():
            self._metric.labels(self._run, name).set(value)
        self._step.labels(self._run).set(step)
        self._at.labels(self._run).set(at)

    @contextlib.contextmanager
    def served(self, config: TrackingConfig) -> Iterator[None]:
        """During the body the gauges are served, where the settings name a port. ConfigError."""
        port, host = config.prometheus_port, config.prometheus_host
        if port is None:
            yield
            return
        try:
            server, thread = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise ConfigError(
                f"tracking.prometheus_port = {port} cannot be opened on {host} ({error.strerror}). "
                "Set it to a port that is free."
            ) from error
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
