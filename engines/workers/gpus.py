"""What GPUs do and have used, as NVIDIA's driver tells (package nvidia-ml-py)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from configs.environment import visible_gpus

MILLI = 1e-3
PERCENT = 1e-2


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

    def state(self) -> GpuState:
        ask = self._ask
        return GpuState(
            index=self.index,
            uuid=self.uuid,
            utilization=ask(lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu, PERCENT),
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
    found, count = [], 0
    with contextlib.suppress(driver.NVMLError):  # the driver itself fails: no call may end by that
        count = driver.nvmlDeviceGetCount()
    for index in range(count):
        with contextlib.suppress(driver.NVMLError):  # it was lost meanwhile
            gpu = driver.nvmlDeviceGetHandleByIndex(index)
            uuid = driver.nvmlDeviceGetUUID(gpu)
            if visible is None or any(one == str(index) or uuid.startswith(one) for one in visible):
                found.append(_Gpu(index, uuid, gpu, driver))
    return found


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
