"""Sandboxes of processes: namespaces of this machine's kernel, entered directly or by bubblewrap.

Root and, where bubblewrap is not installed, anybody enters them directly
(engines/sandboxes/namespaces.py). Other users take bubblewrap where there is one: some distributions
let it make user namespaces, and nothing else.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache

from configs.rewards import START_SECONDS, ProcessSandbox
from engines.sandboxes.protocol import SandboxFailed
from engines.sandboxes.supervised import LOADER, SupervisedSandbox
from engines.sandboxes.system_calls import MACHINES

LEAST_KERNEL = (5, 14)  # before it, limits of processes count those outside of the sandbox too
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/localtime",
)
_ASK = (
    "import json, os, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.exec_prefix, "
    "*(os.path.dirname(os.path.dirname(p)) for p in (sys.executable, os.path.realpath("
    "sys.executable)))]))"
)


def open_processes(
    settings: ProcessSandbox, links: Mapping[str, str] | None = None
) -> SupervisedSandbox:
    """Start a sandbox, with links as `open_sandbox` says. SandboxFailed where that fails."""
    links = links or {}
    why = lacking()
    if why is not None:
        raise SandboxFailed(why)
    own = interpreter()
    visible = list(dict.fromkeys([*SYSTEM, *prefixes(own), *prefixes(settings.python or own)]))
    python = [own, "-I", "-S", "-B", "-c", LOADER]
    bubblewrap = None if os.getuid() == 0 else shutil.which("bwrap")
    if bubblewrap is None:
        return SupervisedSandbox(
            ["/usr/bin/env", "-i", *python],
            "engines.sandboxes.namespaces",
            {"visible": visible, "links": dict(links)},
            settings,
            START_SECONDS,
        )
    command = [*_bubblewrap(bubblewrap, visible, links, settings.disk_mib), *python]
    return SupervisedSandbox(command, "engines.sandboxes.supervisor", {}, settings, START_SECONDS)


def lacking() -> str | None:
    """Why this machine can have no sandboxes of processes, as far as that is known without trying."""
    if not sys.platform.startswith("linux"):
        return f"Sandboxes of processes need Linux; this is {platform.system()}."
    if platform.machine() not in MACHINES:
        known = " or ".join(MACHINES)
        return f"Sandboxes of processes need a machine of {known}; this is {platform.machine()}."
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    if found is None or tuple(map(int, found.groups())) < LEAST_KERNEL:
        needed = ".".join(map(str, LEAST_KERNEL))
        return f"Sandboxes of processes need Linux {needed} or newer; this is {platform.release()}."
    return None


def interpreter() -> str:
    """The interpreter that this one's environment was made with: it brings no packages along."""
    base: str = getattr(sys, "_base_executable", sys.executable)
    return os.path.realpath(base)


@cache
def prefixes(python: str) -> tuple[str, ...]:
    """Folders that an interpreter reads from, besides /usr; SandboxFailed if it does not run."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _ASK], capture_output=True, timeout=START_SECONDS, check=True
        )
        found = sorted({os.path.normpath(path) for path in json.loads(done.stdout)}, key=len)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SandboxFailed(f"The interpreter {python} does not run: {error}") from None
    if "/" in found:
        found.remove("/")
    outermost: list[str] = []
    for path in found:
        if not any(f"{path}/".startswith(f"{other}/") for other in ("/usr", *outermost)):
            outermost.append(path)
    return tuple(outermost)


def _bubblewrap(
    program: str, visible: list[str], links: Mapping[str, str], disk_mib: int
) -> list[str]:
    command = [program, "--unshare-all", "--as-pid-1", "--clearenv", "--new-session"]
    command += ["--hostname", "sandbox"]
    inside = [path for path in visible if path.startswith("/tmp/")]
    for path in visible:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path) and path not in inside:
            command += ["--ro-bind", path, path]
    for path, target in links.items():
        command += ["--symlink", target, path]
    command += ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/tmp", "/dev/shm"):
        command += ["--size", str(disk_mib * 2**20), "--tmpfs", folder]
    for path in inside:
        command += ["--ro-bind", path, path]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/"]
