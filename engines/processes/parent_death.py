"""Processes that die with the process they serve: parent-death signals and killing whole trees.

Linux only where it says so; elsewhere the pipe that every child reads its parent's death from
(see engines/processes/node.py) does the same, a little later.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable

import psutil

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
RESOURCE_TRACKER = "from multiprocessing.resource_tracker import"  # the code that Python runs in it


def _prctl(option: int, value: int) -> bool:
    """Call prctl(2); False where there is none (not Linux)."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")
    return True


def die_with_parent() -> bool:
    """Have the kernel SIGKILL this process when the *thread* that started it ends (Linux).

    Only for processes started from a thread that lives as long as its process.
    """
    return _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wake_at_parents_death() -> bool:
    """Have the kernel continue this process, if it is stopped, when the one that started it ends.

    Linux; a process that runs does not notice.
    """
    return _prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def adopt_orphans() -> bool:
    """Make this process the parent of descendants whose own parent dies (Linux)."""
    return _prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list[psutil.Process]:
    """Every living process below `pid`."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def session(leader: int) -> list[psutil.Process]:
    """Every living process of the session that `leader` started, the leader included."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == leader:
                members.append(process)
    return members


def is_resource_tracker(process: psutil.Process) -> bool:
    """Whether this is Python's helper that unlinks shared memory once its users are gone.

    It ends by itself then; killed early, it would leave the shared memory behind.
    """
    try:
        return any(part.startswith(RESOURCE_TRACKER) for part in process.cmdline())
    except psutil.Error:
        return False


def kill_all(processes: Iterable[psutil.Process]) -> list[int]:
    """SIGKILL processes, save resource trackers and this one; returns the pids killed."""
    killed = []
    for process in processes:
        if process.pid == os.getpid() or is_resource_tracker(process):
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            process.kill()
            killed.append(process.pid)
    return killed


def kill_tree(pid: int) -> list[int]:
    """SIGKILL a process and everything below it; returns the pids."""
    below = descendants(pid)  # before the kill: orphans are no longer found from above
    try:
        top = [psutil.Process(pid)]
    except psutil.NoSuchProcess:
        top = []
    return kill_all([*top, *below])
