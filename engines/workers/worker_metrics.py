"""What a worker measures of itself, for whoever watches a run between its commits."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil
from prometheus_client import Metric

from engines.workers.gpus import GpuState, gpu_states
from engines.workers.spent import METER
from storage.objects.usage import COUNTER, LATENCIES, Latency, Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskSpace:
    """Of the file system of a folder, in bytes."""

    free: int  # that this user may fill
    size: int

    @classmethod
    def of(cls, folder: str) -> DiskSpace:
        """Raises OSError where the folder is not there."""
        found = shutil.disk_usage(folder)
        return cls(free=found.free, size=found.total)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerMetrics:
    """One look at a worker process."""

    host: str  # name of its machine
    process: str  # HOST:PID
    calls: int  # that it is running
    cpu_seconds: float  # of a worker and those that it started, since it began; of a flow alone
    memory: int  # bytes of theirs in memory now; shared pages count in each
    usage: Usage  # of the store, since it began
    latencies: Mapping[str, Latency]  # of the store, by operation, since it began
    gpus: Sequence[GpuState]
    temporary: DiskSpace  # of the folder of temporary files
    engines: Mapping[str, Sequence[Metric]] = field(default_factory=dict)  # by role


def measured(calls: int, engines: Mapping[str, Sequence[Metric]]) -> WorkerMetrics:
    """What this worker measures; `calls` that it runs, `engines` as WorkerMetrics has them."""
    return _measured(calls, engines, METER.spent().cpu_seconds, _memory())


def measured_flow() -> WorkerMetrics:
    """What a flow's process measures of itself alone: its children are workers, or vLLM's."""
    process = psutil.Process()
    times = process.cpu_times()
    return _measured(0, {}, times.user + times.system, process.memory_info().rss)


def _measured(
    calls: int, engines: Mapping[str, Sequence[Metric]], cpu_seconds: float, memory: int
) -> WorkerMetrics:
    host = socket.gethostname()
    return WorkerMetrics(
        host=host,
        process=f"{host}:{os.getpid()}",
        calls=calls,
        cpu_seconds=cpu_seconds,
        memory=memory,
        usage=COUNTER.total(),
        latencies=LATENCIES.total(),
        gpus=gpu_states(),
        temporary=DiskSpace.of(tempfile.gettempdir()),
        engines=engines,
    )


def _memory() -> int:
    """Bytes in memory of this process and of those below it."""
    total = 0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
