"""Where an update's time goes: torch's profiler around it, operations by group, the device's share.

On a GPU times are those of kernels and the device is busy in the union of their intervals. On a CPU
they are each operation's own, without those that it calls, and nothing is said of a busy share.
"""

from __future__ import annotations

import gzip
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from engines.train.contract import OperationTime, UpdateProfile

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent

R = TypeVar("R")

SHOWN = 40  # operations that take longest, of those that are told one by one
# By the names of operations and kernels, the first that fits; case does not matter.
GROUPS = {
    "communication": r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_scatter|broadcast",
    "attention": r"attention|flash|fmha|softmax_warp",
    "matrix products": r"gemm|matmul|::mm$|addmm|bmm|linear|cutlass|mkldnn|onednn|_mm\b",
    "optimizer": r"adam|optimizer|foreach|clip_grad|lerp|addcdiv|addcmul|sqrt",
    "log-probs": r"softmax|log_softmax|gather|logsumexp|nll|cross_entropy|scatter",
    "copies": r"copy|_to\b|::to$|memcpy|memset|::cat$|clone|contiguous|index_select|slice_scatter",
    "elementwise": r"elementwise|::mul_?$|::add_?$|::sub_?$|::div_?$|silu|gelu|sigmoid|::pow$|norm"
    r"|rsqrt|::neg$|::exp$|reduce|::sum$|::mean$|triton",
    "autograd and FSDP": r"backward\d*$|accumulategrad|autograd|pythonsubclass|fsdp",
}
OTHER = "others"


def group_of(name: str) -> str:
    """The group of an operation or a kernel, by its name."""
    groups = (group for group, words in GROUPS.items() if re.search(words, name, re.I))
    return next(groups, OTHER)


def recorded(work: Callable[[], R], device: torch.device) -> tuple[R, UpdateProfile, bytes]:
    """Do something and say where its time went; with Chrome's trace of it, gzipped."""
    on_gpu = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds) as profiler:
        started = time.monotonic()
        done = work()
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds = time.monotonic() - started
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace = gzip.compress(file.read_bytes(), 6)
    events = profiler.events() or []
    # Ranges that code names, such as FSDP's, are drawn on the device too, and span its idle time.
    kernels = [e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]
    if on_gpu:
        spans = [
            (kernel.name, kernel.time_range.start, kernel.time_range.end) for kernel in kernels
        ]
        times = [(name, (end - start) / 1e6) for name, start, end in spans]
        busy = union(((start, end) for _, start, end in spans)) / 1e6 / seconds
    else:
        times, busy = [(kernel.name, _own_seconds(kernel)) for kernel in events], None
    return done, UpdateProfile(seconds=seconds, busy=busy, operations=by_operation(times)), trace


def _own_seconds(event: FunctionEvent) -> float:
    return float(event.self_cpu_time_total) / 1e6


def by_operation(times: Iterable[tuple[str, float]]) -> tuple[OperationTime, ...]:
    """Seconds and calls by name, the longest first; those beyond SHOWN together by group."""
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for name, spent in times:
        seconds[name] += spent
        calls[name] += 1
    longest = sorted(seconds, key=lambda name: -seconds[name])
    operations = [
        OperationTime(name=name, group=group_of(name), seconds=seconds[name], calls=calls[name])
        for name in longest[:SHOWN]
    ]
    rest: dict[str, list[str]] = defaultdict(list)
    for name in longest[SHOWN:]:
        rest[group_of(name)].append(name)
    operations += [
        OperationTime(
            name="",
            group=group,
            seconds=sum(seconds[name] for name in names),
            calls=sum(calls[name] for name in names),
        )
        for group, names in rest.items()
    ]
    return tuple(operations)


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of what intervals (start, end) cover, overlaps once."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
