"""What processes begin with: how they keep memory and wait, and where temporary files go.

Those go in a folder that is removed when the cluster ends. A process that is killed cannot remove
its own, and vLLM leaves some even at a proper end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from configs.process import machine_folder

HELD = 2**30  # bytes of free memory at the heap's end that a process keeps
MAPPED = 2**25  # bytes from which an allocation is a mapping, given back when it is freed
C_LIBRARIES = {  # environment variables that glibc and libgomp read when a process starts
    # glibc keeps a heap per thread; a worker's calls change threads, so that each of its heaps would
    # grow to the size of a whole update.
    "MALLOC_ARENA_MAX": "1",
    # Every tensor of some MiB would be mapped, and its pages zeroed by the kernel, at each use: an
    # eighth of an update's time on two cores (docs/benchmarks.md).
    "GLIBC_TUNABLES": ":".join(
        (
            "glibc.malloc.hugetlb=1",
            f"glibc.malloc.mmap_threshold={MAPPED}",
            f"glibc.malloc.trim_threshold={HELD}",
        )
    ),
    # An OpenMP thread that waits for its team looks so often, some 10 us, before it sleeps. By itself
    # it looks for milliseconds, which cores that two engines share lose: two updates beside each
    # other take 1.6 times as long (docs/benchmarks.md). With next to none an update alone does.
    "GOMP_SPINCOUNT": "1000",
}

LEAST_SHARED = 1  # MiB that have to be free in /dev/shm
COLLECT_EVERY = 20_000  # new objects between looks for reference cycles in a flow process
LASTING = "REFRAIN_LASTING"  # environment variable: where temporary files would be otherwise


@contextlib.contextmanager
def imports_uncollected() -> Iterator[None]:
    """Import large libraries in the body without looks for reference cycles.

    They find next to none and take a fifth of the time (docs/benchmarks.md). What was imported is
    left out of later looks, too, which pause a process.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def seldom_collected() -> None:
    """Leave out of looks for reference cycles what stands by now, and look seldom.

    Of a flow process that drives many shards the looks took a fifth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, *gc.get_threshold()[1:])


def keep_temporary_files_in(folder: str) -> None:
    """Have this process and all below it make their temporary files in a folder.

    `folder`: short enough for sockets in it (configs/process.py).
    """
    lasting = os.path.realpath(tempfile.gettempdir())
    os.environ[LASTING] = lasting
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def check_shared_memory(folder: str = "/dev/shm") -> None:
    """ValueError, one sentence, where processes could share no memory and no locks.

    Python's and torch's lie in files there, and a process that cannot make them ends at its start.
    """
    try:
        status = os.statvfs(folder)
    except FileNotFoundError:  # another system than Linux
        return
    free, all = (count * status.f_frsize / 2**20 for count in (status.f_bavail, status.f_blocks))
    if all and free < LEAST_SHARED:
        raise ValueError(
            f"Shared memory on {os.uname().nodename} is full: {folder} has {free:.3g} MiB free of "
            f"{all:.3g}, and worker processes need {LEAST_SHARED} to start. Remove the files in it "
            "that nobody uses, or make it larger (docker run --shm-size, mount -o remount,size=…)."
        )


def name_in_ps(name: str) -> None:
    """Have `ps` and `top` show a name for this process, 15 bytes of it (Linux)."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "wb") as file:
        file.write(name.encode()[:15])


def lasting_folder() -> Path:
    """This user's folder for files that must outlast the cluster, for people to read."""
    return machine_folder("logs", os.environ.get(LASTING))
