"""What a worker process has used: processor seconds, and joules of its GPUs if the driver tells."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import psutil

from engines.workers.gpus import gpu_joules

AT_MOST_EVERY = 0.5  # seconds between two looks; looking at child processes takes milliseconds


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


class Meter:
    """What this process has used, looked at no more than twice a second. Safe to use from threads."""

    def __init__(
        self,
        joules: Callable[[], Mapping[str, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`joules`: as Spent has them."""
        self._joules, self._clock = joules, clock
        self._lock = threading.Lock()
        self._looked: float | None = None
        self._last = Spent()

    def spent(self) -> Spent:
        """Since the process began."""
        with self._lock:
            now = self._clock()
            if self._looked is None or now - self._looked > AT_MOST_EVERY:
                self._last = Spent(cpu_seconds=cpu_seconds(), joules=self._joules())
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


METER = Meter(gpu_joules)  # of this process
