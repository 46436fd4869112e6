"""A run as Prometheus reads it, and how that gets out: by a file, at a port, to a push gateway.

What it has committed, what its stages do and what fails in them; and workers, queues, GPUs, vLLM,
disks and the store, by the last look at them (tasks/run/machinery.py). The names follow Prometheus's
conventions: base units, `_total` for what only grows. Every series has the labels run, flow, recipe
and host, which are put on where the metrics are collected (WithLabels).

The file, which `refrain exporter` reads, stays when the run has ended or died, so that its series go
on, and say so. All three have the same metrics. Nothing here holds a step: looks, files and pushes
have a thread of their own.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    generate_latest,
    push_to_gateway,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import basic_auth_handler, default_handler
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from configs.environment import push_gateway_login
from configs.overrides import ConfigError
from configs.storage import TrackingConfig
from engines.failures import ClusterLost
from engines.workers.worker_metrics import GpuState, WorkerMetrics
from storage.objects.usage import BOUNDS, Latency, Usage
from storage.runs.commit_log import Commit
from tasks.reporting.exporter import SUFFIX
from tasks.run.events import (
    AttemptBegan,
    AttemptEnded,
    Event,
    Listeners,
    Note,
    RunBegan,
    RunEnded,
    ShardSampled,
    StepCommitted,
)
from tasks.run.facts import RunFacts
from tasks.run.machinery import Machinery
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
        self._samples.inc(sum(len(part.ref) for part in event.scored))
        self._unscored.inc(sum(part.failures for part in event.scored))
        for cause in (cause for part in event.scored for cause in part.causes):
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
                labelled = Metric(family.name, family.documentation, family.type, family.unit)
                labelled.samples = [
                    Sample(sample.name, {**self._labels, **sample.labels}, sample.value)
                    for sample in family.samples
                    if not sample.name.endswith("_created")
                ]
                yield labelled


Place = tuple[str, str]  # pool, host
# vLLM's histograms that are passed on, of some thirty; its gauges and counters are, all of them.
VLLM_HISTOGRAMS: Final = frozenset(
    {
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
    }
)
FLOW = "flow"  # in place of a pool, the flow's own process
NO_LATENCY, NO_USAGE = Latency(), Usage()


class MachineryMetrics(Collector):
    """See the module's docstring. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: Machinery | None = None
        self._at = 0.0
        self._before: dict[str, WorkerMetrics] = {}  # by worker process, its last look
        self._usage: dict[Place, Usage] = {}
        self._latencies: dict[tuple[Place, str], Latency] = {}  # by operation
        self._cpu_seconds: dict[Place, float] = {}

    def update(self, look: Machinery | None, at: float) -> None:
        """Take a look over; `at`: when it was, since 1970. None: there were no workers to ask."""
        with self._lock:
            self._at = at
            if look is None:
                return
            self._seen = look
            self._add(FLOW, look.flow)
            for pool, worker in look.workers.values():
                self._add(pool, worker)
            there = {worker.process for _, worker in look.workers.values()} | {look.flow.process}
            self._before = {
                name: metrics for name, metrics in self._before.items() if name in there
            }

    def _add(self, pool: str, now: WorkerMetrics) -> None:
        place, before = (pool, now.host), self._before.get(now.process)
        usage = now.usage - (NO_USAGE if before is None else before.usage)
        self._usage[place] = self._usage.get(place, NO_USAGE) + usage
        spent = now.cpu_seconds - (0.0 if before is None else before.cpu_seconds)
        self._cpu_seconds[place] = self._cpu_seconds.get(place, 0.0) + max(0.0, spent)
        for operation, latency in now.latencies.items():
            old = NO_LATENCY if before is None else before.latencies.get(operation, NO_LATENCY)
            key = (place, operation)
            self._latencies[key] = self._latencies.get(key, NO_LATENCY) + (latency - old)
        self._before[now.process] = now

    def collect(self) -> Iterator[Metric]:
        """As they were at the last look; nothing before the first one."""
        with self._lock:
            if self._at:
                yield GaugeMetricFamily(
                    "refrain_update_timestamp_seconds",
                    "When the run last looked at itself, since 1970; it does so while it lives.",
                    value=self._at,
                )
            if self._seen is not None:
                yield from self._pools(self._seen)
                yield from self._store()
                yield from _disks(self._seen)
                yield from _workers(self._seen)
                yield from _gpus(self._seen)
                yield from _engines(self._seen)

    def _pools(self, look: Machinery) -> Iterable[Metric]:
        live = _gauge("refrain_workers", "Workers that there are.", "pool", "role")
        target = _gauge("refrain_workers_wanted", "Workers that there should be.", "pool", "role")
        for pool in look.pools:
            labels = [pool.name, "+".join(pool.roles)]
            live.add_metric(labels, pool.live)
            target.add_metric(labels, pool.wanted)
        slots = _gauge("refrain_slots", "Calls that live workers take at once.", "pool", "role")
        busy = _gauge("refrain_slots_in_use", "Calls on workers now.", "pool", "role")
        queue = _gauge("refrain_queued_calls", "Calls that wait for a slot.", "pool", "role")
        for load in look.loads:
            slots.add_metric([load.pool, load.role], load.load.slots)
            busy.add_metric([load.pool, load.role], load.load.calls)
            queue.add_metric([load.pool, load.role], load.load.waiting)
        cpu = CounterMetricFamily(
            "refrain_cpu_seconds",
            "Processor seconds of workers and of what they started, and of the flow alone.",
            labels=["pool", "host"],
        )
        for place, seconds in self._cpu_seconds.items():
            cpu.add_metric(place, seconds)
        return live, target, slots, busy, queue, cpu

    def _store(self) -> Iterable[Metric]:
        latency = HistogramMetricFamily(
            "refrain_store_operation_duration_seconds",
            "Seconds of each try of an operation on the store, with the disk's or the network's.",
            labels=["operation", "pool", "host"],
        )
        failures = CounterMetricFamily(
            "refrain_store_operation_failures",
            "Tries that failed; most are made again.",
            labels=["operation", "pool", "host"],
        )
        for (place, operation), histogram in self._latencies.items():
            labels, count, buckets = [operation, *place], 0, []
            for bound, more in zip([*map(str, BOUNDS), "+Inf"], histogram.counts, strict=True):
                count += more
                buckets.append((bound, float(count)))
            latency.add_metric(labels, buckets, sum_value=histogram.seconds)
            failures.add_metric(labels, histogram.failures)
        places = ["pool", "host"]
        read = CounterMetricFamily("refrain_store_read_bytes", "Read of the store.", labels=places)
        writes = CounterMetricFamily(
            "refrain_store_written_bytes", "Written to the store.", labels=places
        )
        requests = CounterMetricFamily(
            "refrain_store_requests", "Made of the store.", labels=places
        )
        for place, usage in self._usage.items():
            read.add_metric(place, usage.bytes_read)
            writes.add_metric(place, usage.bytes_written)
            requests.add_metric(place, usage.requests)
        return latency, failures, read, writes, requests


def _gauge(name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, meaning, labels=labels)


def _roles(look: Machinery) -> Mapping[str, str]:
    return {pool.name: "+".join(pool.roles) for pool in look.pools}


def _workers(look: Machinery) -> Iterable[Metric]:
    names = ("worker", "pool", "role", "host")
    calls = _gauge("refrain_worker_calls", "Calls that a worker runs.", *names)
    memory = _gauge(
        "refrain_worker_memory_bytes",
        "Resident memory of a worker's processes; what they share counts in each.",
        *names,
    )
    roles = _roles(look)
    for name, (pool, worker) in look.workers.items():
        labels = [name, pool, roles.get(pool, ""), worker.host]
        calls.add_metric(labels, worker.calls)
        memory.add_metric(labels, worker.memory)
    return calls, memory


def _disks(look: Machinery) -> Iterable[Metric]:
    free = _gauge("refrain_disk_free_bytes", "Free space where something lies.", "place", "host")
    size = _gauge("refrain_disk_size_bytes", "Size of that file system.", "place", "host")
    spaces = {(place, look.flow.host): space for place, space in look.disks.items()}
    for process in (look.flow, *(worker for _, worker in look.workers.values())):
        spaces["temporary", process.host] = process.temporary
    for labels, space in spaces.items():
        free.add_metric(labels, space.free)
        size.add_metric(labels, space.size)
    return free, size


def _gpus(look: Machinery) -> Iterable[Metric]:
    """Each GPU once on its machine, with the worker that has it."""
    names = ["gpu", "worker", "pool", "role", "host"]
    gauges = (
        (
            "utilization_ratio",
            "Share of the last moments in which a kernel ran.",
            lambda gpu: gpu.utilization,
        ),
        ("memory_used_bytes", "Memory in use, by all processes.", lambda gpu: gpu.memory_used),
        ("memory_size_bytes", "Memory that it has.", lambda gpu: gpu.memory_total),
        ("power_watts", "Power that it draws.", lambda gpu: gpu.power),
        ("temperature_celsius", "Its temperature.", lambda gpu: gpu.temperature),
    )
    roles, gpus_by_id = _roles(look), dict[tuple[str, str], tuple[list[str], GpuState]]()
    for name, (pool, worker) in look.workers.items():
        for gpu in worker.gpus:
            labels = [gpu.uuid, name, pool, roles.get(pool, ""), worker.host]
            gpus_by_id.setdefault((gpu.uuid, worker.host), (labels, gpu))
    for suffix, meaning, value in gauges:
        family = GaugeMetricFamily(f"refrain_gpu_{suffix}", meaning, labels=names)
        for labels, gpu in gpus_by_id.values():
            if (number := value(gpu)) is not None:
                family.add_metric(labels, number)
        yield family
    energy = CounterMetricFamily(
        "refrain_gpu_energy_joules", "Energy since its driver was loaded.", labels=names
    )
    for labels, gpu in gpus_by_id.values():
        if gpu.joules is not None:
            energy.add_metric(labels, gpu.joules)
    yield energy


def _engines(look: Machinery) -> Iterable[Metric]:
    """What engines' libraries measure, under their own names, with the worker and its role."""
    families: dict[str, Metric] = {}
    for name, (pool, worker) in look.workers.items():
        for role, metrics in worker.engines.items():
            more = {"worker": name, "pool": pool, "role": role, "host": worker.host}
            for metric in metrics:
                if metric.type in ("histogram", "summary") and metric.name not in VLLM_HISTOGRAMS:
                    continue
                family = families.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type)
                )
                family.samples += [
                    Sample(sample.name, {**sample.labels, **more}, sample.value)
                    for sample in metric.samples
                ]
    return families.values()


KEPT = 7 * 24 * 3600.0  # seconds for which the file of a run that is over stays
PUSH_TIMEOUT = 10.0  # seconds
JOB = "refrain"  # of what is pushed
ENDING = 15.0  # seconds for the last look, file and push of a run that ends


class LiveMetrics:
    """The metrics of one run, from where a flow run has it to where it leaves it."""

    def __init__(self, facts: RunFacts, tell: Callable[[Event], object]) -> None:
        """`tell`: of what cannot be written or sent, once."""
        self._config: TrackingConfig = facts.config.tracking
        self._run, self._tell = facts.name, tell
        self.events = RunMetrics(facts.config.steps, facts.config.max_staleness)
        self.machinery = MachineryMetrics()
        self.events.registry.register(self.machinery)
        self.registry = CollectorRegistry()
        labels = {
            "run": facts.name,
            "flow": facts.flow.rpartition(":")[2],
            "recipe": facts.config.name,
            "host": os.uname().nodename,  # of the flow
        }
        self.registry.register(WithLabels(self.events.registry, labels))
        self._said = set[str]()
        self._served = contextlib.ExitStack()

    def listen(self, listeners: Listeners) -> None:
        """Hear what the run says; nobody is told of anything before a flow run has it."""
        self.events.listen(listeners)
        listeners.on(RunBegan, self.run_began)
        listeners.on(RunEnded, lambda event: self._served.close())

    def run_began(self, event: RunBegan) -> None:
        """From here on the metrics can be read. ConfigError where the port cannot be opened."""
        self._served.enter_context(self.served())
        if self._config.metrics_every:
            self._served.enter_context(self.looking(event.look))

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """During the body the metrics are served, where the settings name a port. ConfigError."""
        port, host = self._config.prometheus_port, self._config.prometheus_host
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

    @contextlib.contextmanager
    def looking(self, look: Callable[[], Machinery | None]) -> Iterator[None]:
        """During the body, look, write the file and push every so often; and once more at its end."""
        ended = threading.Event()

        def watch() -> None:
            self._forget_old_files()
            while not ended.is_set():
                self._look(look)
                ended.wait(self._config.metrics_every)
            self._look(look)  # once more, and that the run has ended

        thread = threading.Thread(target=watch, name="metrics", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(ENDING)

    def _look(self, look: Callable[[], Machinery | None]) -> None:
        machinery = None
        # A cluster that ends is told by the run itself; the metrics go on with what they had.
        with contextlib.suppress(ClusterLost, TimeoutError, OSError):
            machinery = look()
        self.machinery.update(machinery, time.time())
        self._publish()

    def _publish(self) -> None:
        try:
            write_metrics(Path(self._config.metrics_folder), self._run, self.registry)
        except OSError as error:
            self._warn(
                f"The metrics cannot be written to tracking.metrics_folder = "
                f"{self._config.metrics_folder} ({error.strerror}); the run goes on without."
            )
        gateway = self._config.push_gateway
        if gateway is None:
            return
        try:
            push(gateway, self._run, self.registry)
        except (OSError, ValueError) as error:
            self._warn(f"tracking.push_gateway = {gateway} does not take the metrics ({error}).")

    def _warn(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._tell(Note(text=text, warning=True))

    def _forget_old_files(self) -> None:
        """Those of runs that have been over for long, as far as they are this user's."""
        for path in Path(self._config.metrics_folder).glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > KEPT:
                    path.unlink()


def write_metrics(folder: Path, run: str, registry: CollectorRegistry) -> Path:
    """Put the metrics into the folder, at once or not at all; whoever may list it may read them."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{run}-")
    try:
        with open(handle, "wb") as file:
            file.write(generate_latest(registry))
            os.fchmod(file.fileno(), 0o600 | (folder.stat().st_mode & 0o044))
        path = folder / f"{run}{SUFFIX}"
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def push(gateway: str, run: str, registry: CollectorRegistry) -> None:
    """Put the metrics in place of the run's earlier ones. OSError where they are not taken."""
    login = push_gateway_login()

    def handler(
        url: str,
        method: str,
        timeout: float | None,
        headers: list[tuple[str, str]],
        data: bytes,
    ) -> Callable[[], None]:
        if login is None:
            return default_handler(url, method, timeout, headers, data)
        return basic_auth_handler(url, method, timeout, headers, data, *login)

    push_to_gateway(gateway, JOB, registry, {"run": run}, PUSH_TIMEOUT, handler)
