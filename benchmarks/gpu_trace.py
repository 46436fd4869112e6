"""For how much of a time a device had a kernel to run, exactly: by torch's profiler in every process.

NVML's utilisation (gpu_busy.py) is a share of sample periods, in which one kernel counts like many.
Here every Python process of a flow, the one in which vLLM computes too, has a thread that waits for a
file, profiles what all its threads do on the device until another file is there, and writes when each
kernel and copy began and ended. They are put together: where two processes computed at once, that
time counts once. Where there is no GPU it is the processors' operations: a rehearsal, no figure.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.train.profiling import union

FOLDER = "GPU_TRACE_FOLDER"  # environment variable
NANO = 1e-9
ENOUGH = 30.0  # seconds in which a process writes what it has seen
# What Python runs in each process whose PYTHONPATH has it. One that vLLM forks has no threads of its
# parent's, and gets one. Times of torch's profiler are nanoseconds since the epoch.
CUSTOMIZE = """
import json, os, sys, threading, time

FOLDER = os.environ.get("GPU_TRACE_FOLDER", "")

def there(name):
    return os.path.exists(os.path.join(FOLDER, name))

def write(name, value):
    path = os.path.join(FOLDER, f"{os.getpid()}.{name}")
    with open(path + ".part", "w") as out:
        json.dump(value, out)
    os.replace(path + ".part", path)

def watch():
    while not there("start"):
        if there("stop"):
            return
        time.sleep(0.05)
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "profiler"):
        return
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile
    on_gpu = torch.cuda.is_available()
    if on_gpu and not torch.cuda.is_initialized():
        return
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    profiler = profile(
        activities=[kind], experimental_config=_ExperimentalConfig(profile_all_threads=not on_gpu)
    )
    profiler.start()
    write("started", time.time())
    while not there("stop"):
        time.sleep(0.05)
    stopped = time.time()
    profiler.stop()
    spans, until = [], 0
    events = profiler.profiler.kineto_results.events()
    own = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if not event.is_user_annotation()
        and (event.device_type() != torch.autograd.DeviceType.CPU) == on_gpu
    )
    for start, end in own:
        if spans and start <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, end])
    write("spans", {"until": stopped, "events": len(own), "spans": spans})

def begin():
    threading.Thread(target=watch, name="gpu-trace", daemon=True).start()

if FOLDER:
    os.register_at_fork(after_in_child=begin)
    begin()
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What a process had the device do between two times."""

    begin: float  # seconds since the epoch
    end: float
    spans: Sequence[tuple[float, float]]  # seconds since the epoch
    events: int  # kernels and copies


class Trace:
    """Of the processes that are started with its environment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        code = folder / "code"
        code.mkdir(parents=True)
        (code / "sitecustomize.py").write_text(CUSTOMIZE)

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """With which a process has itself and those that it starts looked at."""
        path = os.pathsep.join([str(self._folder / "code"), environment.get("PYTHONPATH", "")])
        return {**environment, FOLDER: str(self._folder), "PYTHONPATH": path}

    def start(self) -> None:
        """Have every process begin; the first use of a profiler takes seconds."""
        (self._folder / "start").touch()

    def stop(self) -> dict[int, Seen]:
        """What each process saw, by its id; without one that has died or takes too long."""
        (self._folder / "stop").touch()
        begun = {int(file.stem): file for file in self._folder.glob("*.started")}
        deadline = time.monotonic() + ENOUGH
        found: dict[int, Seen] = {}
        while begun.keys() - found.keys() and time.monotonic() < deadline:
            for pid in begun.keys() - found.keys():
                file = self._folder / f"{pid}.spans"
                if file.exists():
                    found[pid] = _read(begun[pid], file)
            time.sleep(0.05)
        return found


def _read(started: Path, spans: Path) -> Seen:
    told = json.loads(spans.read_text())
    return Seen(
        begin=json.loads(started.read_text()),
        end=told["until"],
        spans=[(start * NANO, end * NANO) for start, end in told["spans"]],
        events=told["events"],
    )


def busy(seen: Iterable[Seen], begin: float, end: float) -> float | None:
    """The share of a time, in seconds since the epoch, in which any process's kernels ran.

    None where that time is not within what all of them saw.
    """
    every = list(seen)
    if not every or begin >= end or any(one.begin > begin or one.end < end for one in every):
        return None
    clipped = [
        (max(start, begin), min(stop, end))
        for one in every
        for start, stop in one.spans
        if stop > begin and start < end
    ]
    return union(clipped) / (end - begin)
