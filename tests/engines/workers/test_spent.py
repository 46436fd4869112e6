"""What processes and GPUs used, by a driver that is written by hand: there is no GPU here."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from engines.workers.worker_metrics import Busy, Meter, Spent, SpentSince, cpu_seconds


def test_the_processes_that_a_process_started_count() -> None:
    before = cpu_seconds()
    # More than is waited for: the kernel counts in hundredths, and may have one less. By the counters
    # that are read here: time.process_time counts what a virtual machine's host took away, too.
    burn = "import os\nwhile sum(os.times()[:2]) < 0.5: pass\ninput()"
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while sum(psutil.Process(child.pid).cpu_times()[:2]) < 0.4 and time.monotonic() < deadline:
        time.sleep(0.05)
    alive = cpu_seconds()
    child.communicate(b"\n")
    assert round(alive - before, 2) >= 0.4  # of hundredths, as floats
    assert cpu_seconds() >= alive - 0.05, "it has ended, and counts still"


def test_a_meter_looks_twice_a_second_at_most() -> None:
    now, joules = [0.0], {"GPU-aa": 5.0}
    meter = Meter(joules.copy, dict, lambda: now[0])
    assert meter.spent().joules["GPU-aa"] == 5.0
    joules["GPU-aa"] = 6.0
    now[0] = 0.5
    assert meter.spent().joules["GPU-aa"] == 5.0
    now[0] = 1.5
    assert meter.spent().joules["GPU-aa"] == 6.0


def test_what_was_used_since_the_last_look() -> None:
    since = SpentSince()
    told = {("train", "host:1"): Spent(cpu_seconds=2.0, joules={"GPU-aa": 50.0})}
    first = since.since_last(told)["train"]
    assert (first.cpu_seconds, first.joules) == (2.0, 0.0), "a GPU counts from the first look"
    told = {
        ("train", "host:1"): Spent(cpu_seconds=3.0, joules={"GPU-aa": 80.0}),
        ("train", "host:2"): Spent(cpu_seconds=1.0, joules={"GPU-aa": 90.0}),  # the same GPU
        ("cpu", "host:3"): Spent(cpu_seconds=0.5),
    }
    then = since.since_last(told)
    assert (then["train"].cpu_seconds, then["train"].joules) == (2.0, 40.0)
    assert (then["cpu"].cpu_seconds, then["cpu"].joules) == (0.5, None)


def test_the_share_of_time_in_which_a_pools_gpus_had_work_since_the_last_look() -> None:
    since = SpentSince()
    told = {("train", "host:1"): Spent(busy={"GPU-aa": Busy(seconds=1.0, of=4.0)})}
    assert since.since_last(told)["train"].busy == 0.25
    told = {
        ("train", "host:1"): Spent(busy={"GPU-aa": Busy(seconds=4.0, of=8.0)}),  # 3 of 4 more
        ("train", "host:2"): Spent(busy={"GPU-bb": Busy(seconds=1.0, of=4.0)}),
        ("cpu", "host:3"): Spent(cpu_seconds=0.5),
    }
    then = since.since_last(told)
    assert (then["train"].busy, then["cpu"].busy) == (0.5, None)
    assert since.since_last(told)["train"].busy is None, "nobody looked meanwhile"


# NVIDIA's library as far as its functions are called: two GPUs, the second without a counter.
LIBRARY = r"""
#include <string.h>
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) {
    *gpu = (void *)(unsigned long)(index + 1); return 0; }
int nvmlDeviceGetUUID(void *gpu, char *uuid, unsigned length) {
    strncpy(uuid, gpu == (void *)1 ? "GPU-aa" : "GPU-bb", length); return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *gpu, unsigned long long *millijoules) {
    static unsigned long long told = 5000;
    if (gpu != (void *)1) return 3;  /* NVML_ERROR_NOT_SUPPORTED */
    *millijoules = told; told += 250; return 0; }
"""


def test_nvidias_own_package_reads_the_drivers_library(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="needs the extra energy")
    compiler = shutil.which("cc") or pytest.skip("no C compiler is installed")
    source, library = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
    source.write_text(LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    program = (
        "from engines.workers.worker_metrics import machine_gpu_states\n"
        "from engines.workers.worker_metrics import METER\n"
        "print(METER.spent().joules, *(gpu.uuid for gpu in machine_gpu_states()))"
    )

    def told(**variables: str) -> str:
        hidden = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        done = subprocess.run(
            [sys.executable, "-c", program], env=hidden | variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    there = {"LD_LIBRARY_PATH": str(tmp_path)}
    assert told(**there) == "{'GPU-aa': 5.0} GPU-aa GPU-bb"
    assert told(**there, CUDA_VISIBLE_DEVICES="1") == "{} GPU-aa GPU-bb"
    without = told(**there, CUDA_VISIBLE_DEVICES="")  # as workers without GPUs have it
    assert without == "{} GPU-aa GPU-bb"
    if ctypes.util.find_library("nvidia-ml") is None:
        assert told() == "{}", "no driver here"
