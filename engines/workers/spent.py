"""What a worker process has used: processor seconds, and joules of its GPUs if the driver tells."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from configs.environment import visible_gpus

AT_MOST_EVERY = 0.5  # seconds between two looks; looking at child processes takes milliseconds
MILLI = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Counts that only grow."""

    cpu_seconds: float = 0.0  # of the process and those that it started, since it began
    joules: Mapping[str, float] = field(
        default_factory=dict
    )  # by GPU (UUID), since its driver began


@dataclass(frozen=True, kw_only=True, slots=True)
class SpentOfPool:
    """What the processes of a pool used between two looks."""

    cpu_seconds: float = 0.0
    joules: float | None = None  # of its GPUs; None: no driver told


class SpentSince:
    """What each pool has used since the last look.

    A worker tells its counts with the result of each call. What one that died used after its last
    call is lost, but for its GPUs, which go on counting. A GPU counts from when it is first told of.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], Spent] = {}  # by pool and process
        self._gpus: dict[str, float] = {}  # by UUID

    def since_last(self, told: Mapping[tuple[str, str], Spent]) -> dict[str, SpentOfPool]:
        """By pool; `told`: by pool and process, what it has used since it began."""
        cpu: dict[str, float] = {}
        joules: dict[str, float] = {}
        highest = dict(self._gpus)
        for (pool, process), now in dict(told).items():
            before = self._before.get((pool, process), Spent())
            cpu[pool] = cpu.get(pool, 0.0) + now.cpu_seconds - before.cpu_seconds
            self._before[pool, process] = now
            for gpu, count in now.joules.items():  # several processes may have one GPU
                last = highest.get(gpu, count)
                joules[pool] = joules.get(pool, 0.0) + max(0.0, count - last)
                highest[gpu] = max(last, count)
        self._gpus = highest
        return {
            pool: SpentOfPool(cpu_seconds=seconds, joules=joules.get(pool))
            for pool, seconds in cpu.items()
        }


class Driver(Protocol):
    """The functions of pynvml that are called here."""

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> object: ...
    def nvmlDeviceGetUUID(self, handle: object) -> str: ...
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int: ...
    @property
    def NVMLError(self) -> type[Exception]: ...


class GpuEnergy:
    """Joules of the GPUs that a process may use, as NVIDIA's driver counts them (Volta and later).

    Where there is no driver, or a GPU has no counter, there are none.
    """

    def __init__(self, driver: Driver | None, visible: tuple[str, ...] | None) -> None:
        """`visible`: indices or UUIDs, as CUDA_VISIBLE_DEVICES has them; None: all of the machine."""
        self._driver = driver
        self._gpus: dict[str, object] = {}  # UUID -> handle
        if driver is None or visible == ():
            return
        try:
            driver.nvmlInit()
            for index in range(driver.nvmlDeviceGetCount()):
                gpu = driver.nvmlDeviceGetHandleByIndex(index)
                uuid = driver.nvmlDeviceGetUUID(gpu)
                if visible is None or any(
                    one == str(index) or uuid.startswith(one) for one in visible
                ):
                    self._gpus[uuid] = gpu
        except driver.NVMLError:
            self._gpus = {}

    def joules(self) -> dict[str, float]:
        """By GPU, since the driver was loaded."""
        found: dict[str, float] = {}
        for uuid, gpu in self._gpus.items():
            assert self._driver is not None
            try:
                found[uuid] = self._driver.nvmlDeviceGetTotalEnergyConsumption(gpu) * MILLI
            except self._driver.NVMLError:  # this GPU has no counter, or has been lost
                continue
        return found


class Meter:
    """What this process has used, looked at no more than twice a second. Safe to use from threads."""

    def __init__(
        self, energy: Callable[[], GpuEnergy], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`energy` is called at the first look: a driver takes time to answer."""
        self._make, self._clock = energy, clock
        self._lock = threading.Lock()
        self._gpus: GpuEnergy | None = None
        self._looked: float | None = None
        self._last = Spent()

    def spent(self) -> Spent:
        """Since the process began."""
        with self._lock:
            now = self._clock()
            if self._looked is None or now - self._looked > AT_MOST_EVERY:
                if self._gpus is None:
                    self._gpus = self._make()
                self._last = Spent(cpu_seconds=cpu_seconds(), joules=self._gpus.joules())
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


def nvidia_driver() -> Driver | None:
    """NVIDIA's, where the extra `energy` is installed."""
    try:
        import pynvml
    except ImportError:
        return None
    found: Driver = pynvml
    return found


METER = Meter(lambda: GpuEnergy(nvidia_driver(), visible_gpus()))  # of this process
