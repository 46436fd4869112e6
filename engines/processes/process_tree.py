"""Finding and killing what a process started, below it or in its session, and how a child ended."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

RESOURCE_TRACKER = "from multiprocessing.resource_tracker import"  # the code that Python runs in it
PEOPLE = range(1000, 60_000)  # numbers of users that login.defs gives to people


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


def exit_code(process: BaseProcess, within: float = 1.0) -> int | None:
    """How a child that has ended did so, in at most `within` seconds; None if that is not known.

    Two threads that ask at once (vLLM watches its core as well) race: one takes the code from the
    kernel, and the other reads None until the first has written it down.
    """
    process.join(within)
    until = time.monotonic() + within
    while (code := process.exitcode) is None and time.monotonic() < until:
        time.sleep(0.005)
    return code


def how_it_ended(code: int | None) -> str:
    """An exit code in words that follow the process's name: "was killed by SIGKILL"."""
    if code is None:
        return "ended"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def other_people(processes: Path = Path("/proc")) -> list[str]:
    """Names of the other people with processes here, as far as the kernel shows them; sorted."""
    users = set()
    with contextlib.suppress(OSError), os.scandir(processes) as entries:
        for entry in entries:
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it has ended
                    users.add(entry.stat(follow_symlinks=False).st_uid)
    return sorted(map(_name, (users & set(PEOPLE)) - {os.getuid()}))


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
