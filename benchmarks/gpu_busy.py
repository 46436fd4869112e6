"""The first GPU by NVML: what is taken of it, and the share of time in which it has work."""

from __future__ import annotations

import importlib
import importlib.util
import threading
import time
from types import ModuleType

EVERY = 0.1  # seconds between looks


class Device:
    """The first GPU, as NVML sees it."""

    def __init__(self, nvml: ModuleType) -> None:
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(0)

    @classmethod
    def first(cls) -> Device | None:
        """None where there is no GPU, or no NVML for Python: pynvml, or the copy that vLLM has."""
        own, vllms = (importlib.util.find_spec(name) for name in ("pynvml", "vllm"))
        if own is None and vllms is None:
            return None
        nvml = importlib.import_module("vllm.third_party.pynvml" if own is None else "pynvml")
        try:
            nvml.nvmlInit()
            return cls(nvml)
        except nvml.NVMLError:
            return None

    def taken(self) -> int:
        """Bytes that are held by anybody."""
        nvml = self._nvml  # the second form leaves out what the driver has reserved
        return int(nvml.nvmlDeviceGetMemoryInfo(self._handle, version=nvml.nvmlMemory_v2).used)

    def busy(self) -> int:
        """Percent of NVML's last sample period (a sixth of a second to a second) with a kernel."""
        return int(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)


class Watch:
    """Looks at a device ten times a second, until it is closed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._looks: list[tuple[float, int]] = []  # seconds since the epoch, percent
        self._most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def share(self, since: float, until: float) -> float | None:
        """The mean share of a time in which the device had work; None where no look fell in it."""
        within = [percent for at, percent in list(self._looks) if since <= at <= until]
        return sum(within) / len(within) / 100 if within else None

    @property
    def most_taken(self) -> int:
        """Bytes of the device that were held at most, by anybody."""
        return self._most

    def close(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join(1.0)

    def _look(self) -> None:
        while not self._ended.wait(EVERY):
            self._looks.append((time.time(), self._device.busy()))
            self._most = max(self._most, self._device.taken())
