"""Sandboxes of containers: Docker or Podman, by command.

The first process of the container is the same supervisor as in sandboxes of processes, so programs,
limits and output are handled alike; the image needs Python and nothing else. The container's own
limits hold besides, somewhat wider, for what the supervisor cannot see.
"""

from __future__ import annotations

import os
import socket
import subprocess
import uuid

from configs.rewards import ContainerSandbox
from engines.sandboxes.supervised import LOADER, SupervisedSandbox

USER = "65534:65534"
OWN_MIB = 64  # of the supervisor, and for what the kernel counts besides
OWN_PROCESSES = 8  # of the supervisor, and of the runtime
REMOVE_SECONDS = 30.0
LABEL = "refrain.owner"  # HOST:PID of the process that started it; finds what outlived its owner


def open_container(settings: ContainerSandbox) -> SupervisedSandbox:
    """Start a container; SandboxFailed, with what the command said, when that fails."""
    name = f"refrain-{uuid.uuid4().hex[:16]}"

    def remove() -> None:
        # Ending it is the supervisor's: this is for one whose command or daemon was lost meanwhile.
        try:
            subprocess.run(
                [settings.command, "rm", "--force", name],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=REMOVE_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired):
            return  # a daemon that hangs removes the container itself, once that has ended

    return SupervisedSandbox(
        command_of(settings, name),
        "engines.sandboxes.supervisor",
        {},
        settings,
        settings.start_timeout,
        remove,
    )


def command_of(settings: ContainerSandbox, name: str) -> list[str]:
    """The command that starts a container of that name."""
    memory = f"{settings.memory_mib + settings.disk_mib + OWN_MIB}m"
    command = [settings.command, "run", "--rm", "--interactive", "--name", name]
    command += ["--label", f"{LABEL}={socket.gethostname()}:{os.getpid()}"]
    command += ["--pull", "never", "--network", "none", "--ipc", "private"]
    command += ["--memory", memory, "--memory-swap", memory]
    command += ["--pids-limit", str(settings.processes + OWN_PROCESSES)]
    command += ["--read-only", "--shm-size", "1m"]
    command += ["--tmpfs", f"/tmp:rw,exec,nosuid,nodev,size={settings.disk_mib}m,mode=1777"]
    command += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", USER]
    if settings.runtime is not None:
        command += ["--runtime", settings.runtime]
    command += ["--entrypoint", settings.python, settings.image]
    return [*command, "-I", "-S", "-B", "-c", LOADER]
