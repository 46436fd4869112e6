"""What the machines are doing that workers run on: processors, memory, disk, network, GPUs.

One worker of each machine looks, when it is asked; names and units are those of MLflow's own monitor
of the machine that a run's flow is on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol, cast

import psutil

from engines.failures import ClusterLost
from engines.workers.cluster import Cluster
from engines.workers.spent import Driver, nvidia_driver
from storage.tracking.machine_samples import MachineSample

ANSWER = 10.0  # seconds for which machines are waited for
MEGA = 1e6  # bytes


class GpuDriver(Driver, Protocol):
    """The functions of pynvml that are called here."""

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> Any: ...
    def nvmlDeviceGetUtilizationRates(self, handle: object) -> Any: ...
    def nvmlDeviceGetPowerUsage(self, handle: object) -> int: ...
    def nvmlDeviceGetEnforcedPowerLimit(self, handle: object) -> int: ...


def look_at_machines(cluster: Cluster, besides: str = "") -> list[MachineSample]:
    """A sample of each machine that has a live worker, but for the host `besides`.

    Those that do not answer are left out; none where the cluster is gone.
    """
    by_host: dict[str, str] = {}
    try:
        for member in cluster.members(max_age=60.0).values():
            by_host.setdefault(member.host, member.address)
        answers: Mapping[str, object] = cluster.ask(
            cluster.client.run,
            look,
            workers=list(by_host.values()),
            on_error="return",
            timeout=ANSWER,
        )
    except (ClusterLost, TimeoutError, OSError, ValueError):
        return []
    found = [one for one in answers.values() if isinstance(one, MachineSample)]
    return sorted((one for one in found if one.host != besides), key=lambda one: one.host)


def look() -> MachineSample:
    """By client.run: what this machine is doing. Per cents of processors are since the last look."""
    memory, disk = psutil.virtual_memory(), psutil.disk_usage(os.sep)
    network, (received, sent) = psutil.net_io_counters(), _network_at_first()
    metrics = {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": memory.used / MEGA,
        "system_memory_usage_percentage": memory.used / memory.total * 100,
        "disk_usage_percentage": disk.percent,
        "disk_usage_megabytes": disk.used / MEGA,
        "disk_available_megabytes": disk.free / MEGA,
        "network_receive_megabytes": (network.bytes_recv - received) / MEGA,
        "network_transmit_megabytes": (network.bytes_sent - sent) / MEGA,
        **gpu_metrics(_gpus()),
    }
    return MachineSample(host=socket.gethostname(), at=time.time(), metrics=metrics)


def gpu_metrics(driver: GpuDriver | None) -> dict[str, float]:
    """Of each GPU that the driver has, by its number; what a card does not tell is left out."""
    if driver is None:
        return {}
    found: dict[str, float] = {}
    try:
        gpus = [driver.nvmlDeviceGetHandleByIndex(n) for n in range(driver.nvmlDeviceGetCount())]
    except driver.NVMLError:
        return {}
    for number, gpu in enumerate(gpus):
        for read in (_memory, _utilization, _power):
            with contextlib.suppress(driver.NVMLError):
                told = read(driver, gpu)
                found |= {f"gpu_{number}_{name}": value for name, value in told.items()}
    return found


def _memory(driver: GpuDriver, gpu: object) -> dict[str, float]:
    memory = driver.nvmlDeviceGetMemoryInfo(gpu)
    return {
        "memory_usage_percentage": memory.used / memory.total * 100,
        "memory_usage_megabytes": memory.used / MEGA,
    }


def _utilization(driver: GpuDriver, gpu: object) -> dict[str, float]:
    return {"utilization_percentage": float(driver.nvmlDeviceGetUtilizationRates(gpu).gpu)}


def _power(driver: GpuDriver, gpu: object) -> dict[str, float]:
    power = driver.nvmlDeviceGetPowerUsage(gpu)  # milliwatts
    limit = driver.nvmlDeviceGetEnforcedPowerLimit(gpu)
    return {"power_usage_watts": power / 1000, "power_usage_percentage": power / limit * 100}


@cache
def _network_at_first() -> tuple[int, int]:
    """Bytes received and sent by this machine when it was first looked at."""
    network = psutil.net_io_counters()
    return network.bytes_recv, network.bytes_sent


@cache
def _gpus() -> GpuDriver | None:
    """The driver, begun; None where there is none."""
    driver = nvidia_driver()
    if driver is None:
        return None
    try:
        driver.nvmlInit()
    except driver.NVMLError:
        return None
    return cast("GpuDriver", driver)
