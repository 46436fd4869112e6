"""How much memory this machine and its GPUs have, as far as they say."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

CGROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def host_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroups: tuple[Path, ...] = CGROUPS
) -> tuple[int | None, str]:
    """Bytes that processes here may use: the machine's, or its container's where that is less."""
    total: int | None = None
    if meminfo.exists():
        line = next(
            line for line in meminfo.read_text().splitlines() if line.startswith("MemTotal")
        )
        total = int(line.split()[1]) * 1024
    for file in cgroups:
        text = file.read_text().strip() if file.exists() else "max"
        if text.isdigit() and (total is None or int(text) < total):
            return int(text), str(file)
    return total, "its memory"


def gpu_memory() -> int | None:
    """Bytes of the smallest GPU here; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    listing = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    sizes = [int(line) * 2**20 for line in listing.stdout.split() if line.isdigit()]
    return min(sizes, default=None)
