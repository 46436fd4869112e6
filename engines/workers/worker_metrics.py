"""What a worker process, its GPUs and its machine use, as they are measured there.

GPUs as NVIDIA's driver tells (package nvidia-ml-py). Names and units of a machine are those of
MLflow's own monitor of the machine that a run's flow is on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import psutil
from prometheus_client import Metric

from configs.environment import visible_gpus
from storage.objects.usage import COUNTER, LATENCIES, Latency, Usage
from storage.tracking.machine_samples import MachineSample

MILLI = 1e-3
PERCENT = 1e-2
AT_MOST_EVERY = 0.5  # seconds between two looks; looking at child processes takes milliseconds
BUSY_EVERY = 0.1  # seconds between two looks at whether GPUs have work
# NVIDIA's driver tells what was so for a sixth of a second to a second; more time is not known of.
BUSY_PERIOD = 1.0
MEGA = 1e6  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Busy:
    """How long a GPU had a kernel to run, by whomever, of the time in which it was looked at."""

    seconds: float = 0.0
    of: float = 0.0  # seconds

    def since(self, before: Busy) -> Busy:
        """Counted from an earlier look on."""
        return Busy(seconds=self.seconds - before.seconds, of=self.of - before.of)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Counts that only grow."""

    cpu_seconds: float = 0.0  # of the process and those that it started, since it began
    joules: Mapping[str, float] = field(
        default_factory=dict
    )  # by GPU (UUID), since its driver began
    busy: Mapping[str, Busy] = field(default_factory=dict)  # by GPU, since the process first told


@dataclass(frozen=True, kw_only=True, slots=True)
class SpentOfPool:
    """What the processes of a pool used between two looks."""

    cpu_seconds: float = 0.0
    joules: float | None = None  # of its GPUs; None: no driver told
    busy: float | None = None  # share of the time in which its GPUs had a kernel to run; likewise


class SpentSince:
    """What each pool has used since the last look.

    A worker tells its counts with the result of each call. What one that died used after its last
    call is lost, but for its GPUs, which go on counting. A GPU counts from when it is first told of.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], Spent] = {}  # by pool and process
        self._gpus: dict[str, float] = {}  # by UUID

    def since_last(self, counts: Mapping[tuple[str, str], Spent]) -> dict[str, SpentOfPool]:
        """By pool; `counts`: by pool and process, what it has used since it began."""
        cpu: dict[str, float] = {}
        joules: dict[str, float] = {}
        busy: dict[str, list[Busy]] = {}
        highest = dict(self._gpus)
        for (pool, process), now in dict(counts).items():
            before = self._before.get((pool, process), Spent())
            cpu[pool] = cpu.get(pool, 0.0) + now.cpu_seconds - before.cpu_seconds
            self._before[pool, process] = now
            looks = [told.since(before.busy.get(gpu, Busy())) for gpu, told in now.busy.items()]
            busy.setdefault(pool, []).extend(looks)
            for gpu, count in now.joules.items():  # several processes may have one GPU
                last = highest.get(gpu, count)
                joules[pool] = joules.get(pool, 0.0) + max(0.0, count - last)
                highest[gpu] = max(last, count)
        self._gpus = highest
        return {
            pool: SpentOfPool(cpu_seconds=seconds, joules=joules.get(pool), busy=_share(busy[pool]))
            for pool, seconds in cpu.items()
        }


def _share(looks: Sequence[Busy]) -> float | None:
    """Of all GPUs; one that several processes looked at counts as often."""
    total = sum(look.of for look in looks)
    return sum(look.seconds for look in looks) / total if total > 0 else None


class BusyWatch:
    """Looks at GPUs from a thread of its own, from when it is first asked until the process ends."""

    def __init__(
        self,
        gpus: Callable[[], Sequence[_Gpu]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus, self._clock = gpus, clock
        self._lock = threading.Lock()
        self._watched: Sequence[_Gpu] | None = None  # None: never asked
        self._looked = 0.0
        self._busy: dict[str, Busy] = {}

    def so_far(self) -> dict[str, Busy]:
        """By GPU (UUID), of those that this process may use; empty without a driver."""
        with self._lock:
            if self._watched is None:
                self._watched, self._looked = self._gpus(), self._clock()
                if self._watched:
                    threading.Thread(target=self._watch, name="gpu-busy", daemon=True).start()
            return dict(self._busy)

    def look(self) -> None:
        """Count the time since the last look as what the driver says of it."""
        shares = {gpu.uuid: gpu.utilization() for gpu in self._watched or ()}
        with self._lock:
            now = self._clock()
            seconds, self._looked = min(now - self._looked, BUSY_PERIOD), now
            for gpu, share in shares.items():
                if share is not None:
                    had = self._busy.get(gpu, Busy())
                    self._busy[gpu] = Busy(
                        seconds=had.seconds + share * seconds, of=had.of + seconds
                    )

    def _watch(self) -> None:
        while True:
            time.sleep(BUSY_EVERY)
            self.look()


class Meter:
    """What this process has used, looked at no more than twice a second. Safe to use from threads."""

    def __init__(
        self,
        joules: Callable[[], Mapping[str, float]],
        busy: Callable[[], Mapping[str, Busy]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`joules`, `busy`: as Spent has them."""
        self._joules, self._busy, self._clock = joules, busy, clock
        self._lock = threading.Lock()
        self._looked: float | None = None
        self._last = Spent()

    def spent(self) -> Spent:
        """Since the process began."""
        with self._lock:
            now = self._clock()
            if self._looked is None or now - self._looked > AT_MOST_EVERY:
                self._last = Spent(
                    cpu_seconds=cpu_seconds(), joules=self._joules(), busy=self._busy()
                )
                self._looked = now
            return self._last


def cpu_seconds() -> float:
    """Of this process, those that it started and those of them that have ended."""
    total = 0.0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuState:
    """One GPU now; None: the driver does not tell it of this kind."""

    index: int  # among the machine's
    uuid: str
    utilization: float | None = None  # share of the last sample period with a kernel, 0 to 1
    memory_used: float | None = None  # bytes, of all processes
    memory_total: float | None = None  # bytes
    power: float | None = None  # watts
    power_limit: float | None = None  # watts
    temperature: float | None = None  # degrees Celsius
    joules: float | None = None  # since the driver was loaded


def gpu_states() -> list[GpuState]:
    """Of each GPU that this process may use; none without a driver or the package."""
    return [gpu.state() for gpu in _gpus(visible_gpus())]


def machine_gpu_states() -> list[GpuState]:
    """Of each GPU of this machine, whoever may use it; as gpu_states."""
    return [gpu.state() for gpu in _gpus(None)]


def gpu_joules() -> dict[str, float]:
    """Of each GPU that this process may use and that counts them (Volta and later), by UUID."""
    counts = {gpu.uuid: gpu.joules() for gpu in _gpus(visible_gpus())}
    return {uuid: joules for uuid, joules in counts.items() if joules is not None}


@dataclass(frozen=True, slots=True)
class _Gpu:
    index: int
    uuid: str
    handle: object
    driver: Any

    def _ask(self, counter: Callable[[Any, object], Any], unit: float = 1.0) -> float | None:
        """What the driver says; None where this GPU has no such counter, or has been lost."""
        try:
            return float(counter(self.driver, self.handle)) * unit
        except self.driver.NVMLError:
            return None

    def joules(self) -> float | None:
        return self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu), MILLI)

    def utilization(self) -> float | None:
        """Share of the driver's last sample period in which a kernel ran, 0 to 1."""
        return self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu, PERCENT)

    def state(self) -> GpuState:
        ask = self._ask
        return GpuState(
            index=self.index,
            uuid=self.uuid,
            utilization=self.utilization(),
            memory_used=ask(lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
            memory_total=ask(lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
            power=ask(lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu), MILLI),
            power_limit=ask(lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu), MILLI),
            temperature=ask(
                lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
            ),
            joules=self.joules(),
        )


def _gpus(visible: tuple[str, ...] | None) -> list[_Gpu]:
    """`visible`: indices or UUIDs, as CUDA_VISIBLE_DEVICES has them; None: all of the machine."""
    driver = None if visible == () else _driver()
    if driver is None:
        return []
    gpus, count = [], 0
    with contextlib.suppress(driver.NVMLError):  # the driver itself fails: no call may end by that
        count = driver.nvmlDeviceGetCount()
    for index in range(count):
        with contextlib.suppress(driver.NVMLError):  # it was lost meanwhile
            gpu = driver.nvmlDeviceGetHandleByIndex(index)
            uuid = driver.nvmlDeviceGetUUID(gpu)
            if visible is None or any(
                name == str(index) or uuid.startswith(name) for name in visible
            ):
                gpus.append(_Gpu(index, uuid, gpu, driver))
    return gpus


@functools.cache
def _driver() -> Any:
    """NVIDIA's driver; None where there is none, or the extra `energy` is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskSpace:
    """Of the file system of a folder, in bytes."""

    free: int  # that this user may fill
    size: int

    @classmethod
    def of(cls, folder: str) -> DiskSpace:
        """Raises OSError where the folder is not there."""
        usage = shutil.disk_usage(folder)
        return cls(free=usage.free, size=usage.total)


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


def machine_sample() -> MachineSample:
    """By client.run: what this machine is doing. Per cents of processors are since the last look."""
    memory, disk = psutil.virtual_memory(), psutil.disk_usage(os.sep)
    network, (down, up) = psutil.net_io_counters(), _network_at_first()
    metrics = {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": memory.used / MEGA,
        "system_memory_usage_percentage": memory.used / memory.total * 100,
        "disk_usage_percentage": disk.percent,
        "disk_usage_megabytes": disk.used / MEGA,
        "disk_available_megabytes": disk.free / MEGA,
        "network_receive_megabytes": (network.bytes_recv - down) / MEGA,
        "network_transmit_megabytes": (network.bytes_sent - up) / MEGA,
    }
    for gpu in machine_gpu_states():
        metrics |= gpu_metrics(gpu)
    return MachineSample(host=socket.gethostname(), at=time.time(), metrics=metrics)


def gpu_metrics(gpu: GpuState) -> dict[str, float]:
    """Of a GPU, by its number; what it does not tell is left out."""
    metrics: dict[str, float] = {}
    if gpu.memory_used is not None and gpu.memory_total:
        metrics["memory_usage_percentage"] = gpu.memory_used / gpu.memory_total * 100
        metrics["memory_usage_megabytes"] = gpu.memory_used / MEGA
    if gpu.utilization is not None:
        metrics["utilization_percentage"] = round(gpu.utilization * 100)  # whole at the driver
    if gpu.power is not None:
        metrics["power_usage_watts"] = gpu.power
        if gpu.power_limit:
            metrics["power_usage_percentage"] = gpu.power / gpu.power_limit * 100
    return {f"gpu_{gpu.index}_{name}": value for name, value in metrics.items()}


@cache
def _network_at_first() -> tuple[int, int]:
    """Bytes received and sent by this machine when it was first looked at."""
    network = psutil.net_io_counters()
    return network.bytes_recv, network.bytes_sent


METER = Meter(gpu_joules, BusyWatch(lambda: _gpus(visible_gpus())).so_far)  # of this process
