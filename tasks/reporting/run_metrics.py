"""A run as Prometheus reads it: what it has committed, what its stages do and what fails in them.

What is asked of workers is in machinery_metrics.py, how the metrics get out in prometheus.py. The
names follow Prometheus's conventions: base units, `_total` for what only grows. Every series has the
labels run, flow, recipe and host, which are put on where the metrics are collected (WithLabels).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from storage.runs.commit_log import Commit
from tasks.run.events import (
    AttemptBegan,
    AttemptEnded,
    Listeners,
    RunBegan,
    RunEnded,
    ShardSampled,
    StepCommitted,
)
from tasks.run.facts import RunFacts
from tasks.run.metrics import numbers_of

# Seconds, from a tiny model's stage to a step of hours.
BUCKETS: Final = (0.1, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
MOST_METRICS = 500  # series of refrain_metric; a reward function names as many as it likes


class RunMetrics:
    """What the events of one run tell. Safe to use from several threads."""

    def __init__(self, steps: int, max_staleness: int) -> None:
        self.registry = CollectorRegistry()
        self._last: Commit | None = None
        self._metric = Gauge(
            "refrain_metric",
            "A metric of the last committed step, by its name in the commit.",
            ("metric",),
            registry=self.registry,
        )
        self._names = set[str]()
        self._left_out = self._gauge(
            "refrain_metrics_left_out", f"Metrics of that step beyond the first {MOST_METRICS}."
        )
        self._gauge("refrain_target_steps", "Steps that the run is to make.").set(steps)
        self._gauge(
            "refrain_max_staleness_steps", "Versions by which samples may lag, as the settings say."
        ).set(max_staleness)
        self._active = self._gauge(
            "refrain_run_active", "1 while a flow has the run, 0 when it has left it in order."
        )
        self._began = self._gauge(
            "refrain_run_start_timestamp_seconds", "When this flow began or went on with the run."
        )
        self._step_seconds = Histogram(
            "refrain_step_duration_seconds",
            "Seconds between commits, or from a step's beginning to its commit.",
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._stage_seconds = Histogram(
            "refrain_stage_duration_seconds",
            "Seconds of a stage's calls, those that failed too.",
            ("stage",),
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._in_progress = Gauge(
            "refrain_stage_calls_in_progress",
            "A stage's calls that are under way, those in the queue too.",
            ("stage",),
            registry=self.registry,
        )
        self._failures = Counter(
            "refrain_stage_failures",
            "A stage's calls that failed, by the kind of error; most are tried again.",
            ("stage", "error"),
            registry=self.registry,
        )
        self._tokens = Counter(
            "refrain_sampled_tokens", "Tokens of finished shards.", registry=self.registry
        )
        self._samples = Counter(
            "refrain_samples", "Samples of committed steps.", registry=self.registry
        )
        self._unscored = Counter(
            "refrain_reward_failures",
            "Samples of committed steps that a reward function could not score.",
            registry=self.registry,
        )
        self._causes = Counter(
            "refrain_reward_function_failures",
            "The same by the function, where it is known.",
            ("function",),
            registry=self.registry,
        )
        self.registry.register(_Committed(self))

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(name, meaning, registry=self.registry)

    @property
    def last(self) -> Commit | None:
        """The last commit."""
        return self._last

    def listen(self, listeners: Listeners) -> None:
        """Hear what the run says."""
        listeners.on(RunBegan, self.run_began)
        listeners.on(AttemptBegan, self.attempt_began)
        listeners.on(AttemptEnded, self.attempt_ended)
        listeners.on(ShardSampled, lambda event: self._tokens.inc(event.tokens))
        listeners.on(StepCommitted, self.step_committed)
        listeners.on(RunEnded, lambda event: self._active.set(0))

    def run_began(self, event: RunBegan) -> None:
        """A flow has the run."""
        self._active.set(1)
        self._began.set(time.time())
        if event.last is not None:
            self.committed(event.last)

    def attempt_began(self, event: AttemptBegan) -> None:
        """One more is under way."""
        self._in_progress.labels(event.attempt.stage).inc()

    def attempt_ended(self, event: AttemptEnded) -> None:
        """One less."""
        attempt = event.attempt
        self._in_progress.labels(attempt.stage).dec()
        self._stage_seconds.labels(attempt.stage).observe(attempt.ended - attempt.started)
        if attempt.error:
            kind = attempt.error.partition(":")[0]
            self._failures.labels(attempt.stage, kind).inc()

    def step_committed(self, event: StepCommitted) -> None:
        """A step is a part of the run."""
        self._step_seconds.observe(event.metrics["time/step"])
        self._samples.inc(sum(len(one.ref) for one in event.scored))
        self._unscored.inc(sum(one.failures for one in event.scored))
        for cause in (cause for one in event.scored for cause in one.causes):
            self._causes.labels(cause.function).inc(cause.samples)
        self.committed(event.record)

    def committed(self, commit: Commit) -> None:
        """Show a commit; a metric that it does not have is no longer shown."""
        metrics = numbers_of(commit)
        names = sorted(metrics)[:MOST_METRICS]
        for name in self._names.difference(names):
            self._metric.remove(name)
        self._names = set(names)
        for name in names:
            self._metric.labels(name).set(metrics[name])
        self._left_out.set(len(metrics) - len(names))
        self._last = commit


class _Committed(Collector):
    """What the last commit alone tells, so that a run that goes on goes on with its counts."""

    def __init__(self, metrics: RunMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Nothing before the first commit."""
        commit = self._metrics.last
        if commit is None:
            return
        yield CounterMetricFamily("refrain_steps", "Committed steps.", value=commit.step)
        yield GaugeMetricFamily(
            "refrain_last_commit_timestamp_seconds",
            "When the last step was committed, since 1970.",
            value=commit.committed_at,
        )
        ledger = commit.ledger
        prompts = CounterMetricFamily(
            "refrain_prompts",
            "Prompts of committed steps by what became of them.",
            labels=["outcome"],
        )
        prompts.add_metric(["trained"], ledger.trained)
        prompts.add_metric(["filtered"], ledger.filtered)
        prompts.add_metric(["dropped"], sum(ledger.dropped.values()))
        yield prompts


class WithLabels(Collector):
    """The metrics of a registry with labels that all of them have; their own count more.

    Without `_created` samples, which are series of their own in Prometheus's text format.
    """

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry, self._labels = registry, dict(labels)
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """As they are now."""
        with self._lock:  # one reader at a time sees one look
            for family in self._registry.collect():
                found = Metric(family.name, family.documentation, family.type, family.unit)
                found.samples = [
                    Sample(one.name, {**self._labels, **one.labels}, one.value)
                    for one in family.samples
                    if not one.name.endswith("_created")
                ]
                yield found


def labels_of(facts: RunFacts, host: str) -> dict[str, str]:
    """The labels of every series of a run; `host`: name of the flow's machine."""
    return {
        "run": facts.name,
        "flow": facts.flow.rpartition(":")[2],
        "recipe": facts.config.name,
        "host": host,
    }
