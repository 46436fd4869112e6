"""Processes that die with the process they serve, by the parent-death signals of Linux.

Elsewhere the pipe that a node process reads its parent's death from (engines/processes/node.py) does
the same, a little later. Only the standard library is imported here: every process imports this.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Call prctl(2) with a number; nothing where there is none (not Linux). OSError if it fails."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel SIGKILL this process when the *thread* that started it ends (Linux).

    Only for processes started from a thread that lives as long as its process. `parent`: pid of
    the process that is to be the parent; if it died before the signal was set, this one ends now.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def wake_at_parents_death() -> None:
    """Have the kernel continue this process, if it is stopped, when the one that started it ends.

    Linux; a process that runs does not notice.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies (Linux)."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
