"""Workers, queues, GPUs, vLLM, disks and the store of a run as Prometheus reads them.

Made of the last look at them (tasks/run/machinery.py). What only grows is added up here, over workers
that die and come back, so that it does not fall when one leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from engines.workers.gpus import GpuState
from engines.workers.worker_metrics import WorkerMetrics
from storage.objects.usage import BOUNDS, Latency, Usage
from tasks.run.machinery import Machinery

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

    def update(self, seen: Machinery | None, at: float) -> None:
        """Take a look over; `at`: when it was, since 1970. None: there were no workers to ask."""
        with self._lock:
            self._at = at
            if seen is None:
                return
            self._seen = seen
            self._add(FLOW, seen.flow)
            for pool, worker in seen.workers.values():
                self._add(pool, worker)
            there = {one.process for _, one in seen.workers.values()} | {seen.flow.process}
            self._before = {name: one for name, one in self._before.items() if name in there}

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

    def _pools(self, seen: Machinery) -> Iterable[Metric]:
        live = _gauge("refrain_workers", "Workers that there are.", "pool", "role")
        wanted = _gauge("refrain_workers_wanted", "Workers that there should be.", "pool", "role")
        for pool in seen.pools:
            labels = [pool.name, "+".join(pool.roles)]
            live.add_metric(labels, pool.live)
            wanted.add_metric(labels, pool.wanted)
        slots = _gauge("refrain_slots", "Calls that live workers take at once.", "pool", "role")
        busy = _gauge("refrain_slots_in_use", "Calls on workers now.", "pool", "role")
        queue = _gauge("refrain_queued_calls", "Calls that wait for a slot.", "pool", "role")
        for one in seen.loads:
            slots.add_metric([one.pool, one.role], one.load.slots)
            busy.add_metric([one.pool, one.role], one.load.calls)
            queue.add_metric([one.pool, one.role], one.load.waiting)
        cpu = CounterMetricFamily(
            "refrain_cpu_seconds",
            "Processor seconds of workers and of what they started, and of the flow alone.",
            labels=["pool", "host"],
        )
        for place, seconds in self._cpu_seconds.items():
            cpu.add_metric(place, seconds)
        return live, wanted, slots, busy, queue, cpu

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
        for (place, operation), one in self._latencies.items():
            labels, count, buckets = [operation, *place], 0, []
            for bound, more in zip([*map(str, BOUNDS), "+Inf"], one.counts, strict=True):
                count += more
                buckets.append((bound, float(count)))
            latency.add_metric(labels, buckets, sum_value=one.seconds)
            failures.add_metric(labels, one.failures)
        places = ["pool", "host"]
        read = CounterMetricFamily("refrain_store_read_bytes", "Read of the store.", labels=places)
        written = CounterMetricFamily(
            "refrain_store_written_bytes", "Written to the store.", labels=places
        )
        requests = CounterMetricFamily(
            "refrain_store_requests", "Made of the store.", labels=places
        )
        for place, usage in self._usage.items():
            read.add_metric(place, usage.bytes_read)
            written.add_metric(place, usage.bytes_written)
            requests.add_metric(place, usage.requests)
        return latency, failures, read, written, requests


def _gauge(name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, meaning, labels=labels)


def _roles(seen: Machinery) -> Mapping[str, str]:
    return {pool.name: "+".join(pool.roles) for pool in seen.pools}


def _workers(seen: Machinery) -> Iterable[Metric]:
    names = ("worker", "pool", "role", "host")
    calls = _gauge("refrain_worker_calls", "Calls that a worker runs.", *names)
    memory = _gauge(
        "refrain_worker_memory_bytes",
        "Resident memory of a worker's processes; what they share counts in each.",
        *names,
    )
    roles = _roles(seen)
    for name, (pool, one) in seen.workers.items():
        labels = [name, pool, roles.get(pool, ""), one.host]
        calls.add_metric(labels, one.calls)
        memory.add_metric(labels, one.memory)
    return calls, memory


def _disks(seen: Machinery) -> Iterable[Metric]:
    free = _gauge("refrain_disk_free_bytes", "Free space where something lies.", "place", "host")
    size = _gauge("refrain_disk_size_bytes", "Size of that file system.", "place", "host")
    found = {(place, seen.flow.host): space for place, space in seen.disks.items()}
    for one in (seen.flow, *(worker for _, worker in seen.workers.values())):
        found["temporary", one.host] = one.temporary
    for labels, space in found.items():
        free.add_metric(labels, space.free)
        size.add_metric(labels, space.size)
    return free, size


def _gpus(seen: Machinery) -> Iterable[Metric]:
    """Each GPU once on its machine, with the worker that has it."""
    names = ["gpu", "worker", "pool", "role", "host"]
    gauges = (
        ("utilization_ratio", "Share of the last moments in which a kernel ran.", _utilization),
        ("memory_used_bytes", "Memory in use, by all processes.", lambda gpu: gpu.memory_used),
        ("memory_size_bytes", "Memory that it has.", lambda gpu: gpu.memory_total),
        ("power_watts", "Power that it draws.", lambda gpu: gpu.power),
        ("temperature_celsius", "Its temperature.", lambda gpu: gpu.temperature),
    )
    roles, found = _roles(seen), dict[tuple[str, str], tuple[list[str], GpuState]]()
    for name, (pool, one) in seen.workers.items():
        for gpu in one.gpus:
            labels = [gpu.uuid, name, pool, roles.get(pool, ""), one.host]
            found.setdefault((gpu.uuid, one.host), (labels, gpu))
    for suffix, meaning, value in gauges:
        family = GaugeMetricFamily(f"refrain_gpu_{suffix}", meaning, labels=names)
        for labels, gpu in found.values():
            if (known := value(gpu)) is not None:
                family.add_metric(labels, known)
        yield family
    energy = CounterMetricFamily(
        "refrain_gpu_energy_joules", "Energy since its driver was loaded.", labels=names
    )
    for labels, gpu in found.values():
        if gpu.joules is not None:
            energy.add_metric(labels, gpu.joules)
    yield energy


def _utilization(gpu: GpuState) -> float | None:
    return gpu.utilization


def _engines(seen: Machinery) -> Iterable[Metric]:
    """What engines' libraries measure, under their own names, with the worker and its role."""
    families: dict[str, Metric] = {}
    for name, (pool, one) in seen.workers.items():
        for role, metrics in one.engines.items():
            more = {"worker": name, "pool": pool, "role": role, "host": one.host}
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
