"""What a machine was doing at a moment, under the names that MLflow's own monitor gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineSample:
    """A look at a machine that workers run on."""

    host: str
    at: float  # seconds since 1970
    # cpu_utilization_percentage, system_memory_usage_megabytes, gpu_0_utilization_percentage, …
    metrics: Mapping[str, float]
