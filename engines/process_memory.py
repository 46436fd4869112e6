"""How glibc's malloc is set up in processes that hold engines.

Environment variables, for glibc reads them when a program starts. Other C libraries ignore them.
"""

from __future__ import annotations

HELD = 2**30  # bytes of free memory at the heap's end that a process keeps
MAPPED = (
    2**25
)  # bytes from which an allocation is a mapping of its own, given back when it is freed

MALLOC = {
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
}
