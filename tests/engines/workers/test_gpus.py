"""What GPUs do and have used, as a driver tells it that stands in for NVIDIA's."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engines.workers import worker_metrics
from engines.workers.worker_metrics import Busy, BusyWatch


class NoCounter(Exception):
    """NVIDIA's NVMLError."""


def not_here(*words: Any) -> Any:
    raise NoCounter


def driver(count: int, **functions: Any) -> ModuleType:
    """A package pynvml whose GPU n is GPU-an, its numbers made of n."""
    found = ModuleType("pynvml")
    names: dict[str, Any] = {
        "NVMLError": NoCounter,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: count,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda gpu: f"GPU-a{gpu}",
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=2**30 + gpu, total=2**33),
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=50 + gpu, memory=3),
        "nvmlDeviceGetPowerUsage": lambda gpu: 300_000 + gpu,
        "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
        "nvmlDeviceGetTemperature": lambda gpu, sensor: 60 + gpu + sensor,
        "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: 9_000 + gpu,
    }
    vars(found).update(names | functions)
    return found


@pytest.fixture(autouse=True)
def looked_anew() -> Iterator[None]:
    worker_metrics._driver.cache_clear()
    yield
    worker_metrics._driver.cache_clear()


def test_numbers_are_in_base_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(1))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (gpu,) = worker_metrics.gpu_states()
    assert gpu.uuid == "GPU-a0"
    assert gpu.utilization == pytest.approx(0.5)
    assert (gpu.memory_used, gpu.memory_total) == (2**30, 2**33)
    assert (gpu.power, gpu.power_limit) == (300.0, 700.0)
    assert (gpu.temperature, gpu.joules) == (60.0, 9.0)


@pytest.mark.parametrize(
    ("visible", "seen"), [("1", [1]), ("GPU-a2,0", [0, 2]), ("GPU-a", [0, 1, 2]), ("", [])]
)
def test_a_worker_tells_of_its_own_alone(
    visible: str, seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [one.index for one in worker_metrics.gpu_states()] == seen
    assert list(worker_metrics.gpu_joules()) == [f"GPU-a{index}" for index in seen]
    assert [one.index for one in worker_metrics.machine_gpu_states()] == [0, 1, 2]


def test_what_a_gpu_has_no_counter_of_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(1, nvmlDeviceGetPowerUsage=not_here))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (gpu,) = worker_metrics.gpu_states()
    assert gpu.power is None and gpu.temperature == 60.0


def test_gpus_that_are_lost_or_older_than_the_counter_of_energy_have_no_joules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functions = {
        "nvmlDeviceGetHandleByIndex": lambda index: index or not_here(),
        "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: 7_000 if gpu == 2 else not_here(),
    }
    monkeypatch.setitem(sys.modules, "pynvml", driver(3, **functions))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [one.index for one in worker_metrics.gpu_states()] == [1, 2]
    assert worker_metrics.gpu_joules() == {"GPU-a2": 7.0}


def test_without_a_driver_or_the_package_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", driver(1, nvmlInit=not_here))
    assert worker_metrics.gpu_states() == worker_metrics.machine_gpu_states() == []
    worker_metrics._driver.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", driver(1, nvmlDeviceGetCount=not_here))
    assert worker_metrics.gpu_states() == [] and worker_metrics.gpu_joules() == {}
    worker_metrics._driver.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert worker_metrics.gpu_states() == [] and worker_metrics.gpu_joules() == {}


def test_time_with_a_kernel_is_added_up_look_by_look(monkeypatch: pytest.MonkeyPatch) -> None:
    now, percent = [100.0], {0: 50, 1: 0}

    def rates(gpu: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=percent[gpu]) if gpu in percent else not_here()

    monkeypatch.setitem(sys.modules, "pynvml", driver(3, nvmlDeviceGetUtilizationRates=rates))
    monkeypatch.setattr(worker_metrics, "BUSY_EVERY", 3600.0)  # the test looks
    watch = BusyWatch(lambda: worker_metrics._gpus(None), lambda: now[0])
    assert watch.so_far() == {}, "nobody has looked"
    now[0] = 100.5
    watch.look()
    percent[1] = 100
    now[0] = 101.0
    watch.look()
    assert watch.so_far() == {
        "GPU-a0": Busy(seconds=0.5, of=1.0),
        "GPU-a1": Busy(seconds=0.5, of=1.0),
    }
    now[0] = 111.0  # of what was before the last second nothing is known
    watch.look()
    assert watch.so_far()["GPU-a1"] == Busy(seconds=1.5, of=2.0)


def test_it_looks_on_its_own_where_there_is_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(1))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(worker_metrics, "BUSY_EVERY", 0.01)
    watch = BusyWatch(lambda: worker_metrics._gpus(worker_metrics.visible_gpus()))
    deadline = time.monotonic() + 30
    while not (told := watch.so_far()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert told["GPU-a0"].seconds == pytest.approx(0.5 * told["GPU-a0"].of)
    assert not BusyWatch(list).so_far()
