"""How busy the GPUs of this process are, as NVIDIA's driver tells (package nvidia-ml-py)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from configs.environment import visible_gpus

MILLI = 1e-3
PERCENT = 1e-2


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuState:
    """One GPU now; None: the driver does not tell it of this kind."""

    uuid: str
    utilization: float | None = (
        None  # share of the last sample period in which a kernel ran, 0 to 1
    )
    memory_used: float | None = None  # bytes, of all processes
    memory_total: float | None = None  # bytes
    power: float | None = None  # watts
    temperature: float | None = None  # degrees Celsius
    joules: float | None = None  # since the driver was loaded


def gpu_states() -> Sequence[GpuState]:
    """Of each GPU that this process may use; none without a driver or the package."""
    driver = _driver()
    if driver is None:
        return ()
    visible, found = visible_gpus(), []
    with contextlib.suppress(driver.NVMLError):  # GPUs that were lost meanwhile
        for index in range(driver.nvmlDeviceGetCount()):
            gpu = driver.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(driver.nvmlDeviceGetUUID(gpu))
            if visible is None or any(one == str(index) or uuid.startswith(one) for one in visible):
                found.append(_state(driver, gpu, uuid))
    return found


def _state(driver: Any, gpu: object, uuid: str) -> GpuState:
    def asked(counter: Callable[[], Any], unit: float = 1.0) -> float | None:
        """What the driver says; None where this GPU has no such counter."""
        try:
            return float(counter()) * unit
        except driver.NVMLError:
            return None

    used = asked(lambda: driver.nvmlDeviceGetMemoryInfo(gpu).used)
    total = asked(lambda: driver.nvmlDeviceGetMemoryInfo(gpu).total)
    return GpuState(
        uuid=uuid,
        utilization=asked(lambda: driver.nvmlDeviceGetUtilizationRates(gpu).gpu, PERCENT),
        memory_used=used,
        memory_total=total,
        power=asked(lambda: driver.nvmlDeviceGetPowerUsage(gpu), MILLI),
        temperature=asked(
            lambda: driver.nvmlDeviceGetTemperature(gpu, driver.NVML_TEMPERATURE_GPU)
        ),
        joules=asked(lambda: driver.nvmlDeviceGetTotalEnergyConsumption(gpu), MILLI),
    )


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


@functools.cache
def _driver() -> Any:
    """NVIDIA's driver; None where there is none, or the extra `energy` is not installed."""
    if visible_gpus() == ():
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
