"""What machines of workers tell of themselves."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from engines.failures import ClusterLost
from engines.workers.cluster import Member
from engines.workers.inspection import look_at_machines
from engines.workers.worker_metrics import GpuState, gpu_metrics, machine_sample
from storage.tracking.machine_samples import MachineSample


def test_each_gpu_is_told_of_as_far_as_it_tells() -> None:
    memory = {"memory_used": 20e6, "memory_total": 80e6}
    gpu = GpuState(
        index=1, uuid="GPU-1", utilization=0.29, power=350.0, power_limit=700.0, **memory
    )
    without_limit = {
        "gpu_1_memory_usage_percentage": 25.0,
        "gpu_1_memory_usage_megabytes": 20.0,
        "gpu_1_utilization_percentage": 29.0,
        "gpu_1_power_usage_watts": 350.0,
    }
    assert gpu_metrics(gpu) == {**without_limit, "gpu_1_power_usage_percentage": 50.0}
    assert gpu_metrics(replace(gpu, power_limit=None)) == without_limit
    assert gpu_metrics(GpuState(index=0, uuid="GPU-0")) == {}


def test_names_are_those_of_mlflows_own_monitor() -> None:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    wanted = set()
    for monitor in (CPUMonitor(), DiskMonitor(), NetworkMonitor()):
        monitor.collect_metrics()
        wanted |= set(monitor.aggregate_metrics())
    found = machine_sample()
    assert {name for name in found.metrics if not name.startswith("gpu_")} == wanted
    assert 0 < found.metrics["system_memory_usage_percentage"] < 100
    assert found.host == socket.gethostname()


def test_one_worker_of_each_machine_looks() -> None:
    asked: list[list[str]] = []

    class Cluster:
        lost = False

        def members(self, max_age: float) -> dict[str, Member]:
            places = {"train-0": "a:1", "rollout-0": "a:2", "rollout-1": "b:1", "cpu-0": "c:1"}
            return {
                name: Member(name=name, address=f"tcp://{place}", pool="p")
                for name, place in places.items()
            }

        def ask_each(
            self, question: object, addresses: Iterable[str], patience: float
        ) -> dict[str, MachineSample]:
            if self.lost:
                raise ClusterLost("gone")
            asked.append(list(addresses))
            answers = asked[-1][:2]  # the third has ended
            return {place: MachineSample(host=place[6], at=1.0, metrics={}) for place in answers}

    cluster: Any = Cluster()
    assert [one.host for one in look_at_machines(cluster, besides="b")] == ["a"]
    assert asked == [["tcp://a:1", "tcp://b:1", "tcp://c:1"]]
    cluster.lost = True
    assert look_at_machines(cluster) == []
