"""What the machines are doing that workers run on: processors, memory, disk, network, GPUs.

One worker of each machine looks, when it is asked; names and units are those of MLflow's own monitor
of the machine that a run's flow is on.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from functools import cache

import psutil

from engines.failures import ClusterLost
from engines.workers.cluster import Cluster
from engines.workers.gpus import GpuState, machine_gpu_states
from storage.tracking.machine_samples import MachineSample

ANSWER = 10.0  # seconds for which machines are waited for
MEGA = 1e6  # bytes


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
