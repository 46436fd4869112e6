"""Opening a sandbox from settings, and the proof that a machine can have one."""

from __future__ import annotations

from collections.abc import Mapping

from configs.rewards import ContainerSandbox, ProcessSandbox
from engines.sandboxes.containers import open_container
from engines.sandboxes.processes import interpreter, open_processes
from engines.sandboxes.protocol import SandboxFailed
from engines.sandboxes.supervised import SupervisedSandbox

PROOF = b"print(6 * 7)"


def open_sandbox(
    settings: ProcessSandbox | ContainerSandbox, links: Mapping[str, str] | None = None
) -> SupervisedSandbox:
    """Start a sandbox (engines/sandboxes/protocol.py); SandboxFailed when it cannot be.

    links: paths of the sandbox's system that lead elsewhere in it, as {"/app": "/tmp/work/app"}.
    """
    if isinstance(settings, ContainerSandbox):
        if links:
            raise SandboxFailed(
                f"A container has no place for {', '.join(links)}, where the task has its files. "
                "Set the sandbox's kind = processes."
            )
        return open_container(settings)
    return open_processes(settings, links or {})


def python_of(settings: ProcessSandbox | ContainerSandbox) -> str:
    """The interpreter of programs, as it is called in the sandbox."""
    return settings.python or interpreter()


def prove(settings: ProcessSandbox | ContainerSandbox, where: str) -> None:
    """Start a sandbox and run a program in it. ValueError, one sentence, where that fails.

    where: the name of the settings.
    """
    try:
        with open_sandbox(settings) as sandbox:
            ran = sandbox.exec([python_of(settings), "-I", "-"], PROOF)
    except SandboxFailed as error:
        if isinstance(settings, ContainerSandbox):
            remedy = f"See that {settings.command} runs and has the image {settings.image}"
        else:
            remedy = f"Set {where}.kind = container, or let users make user namespaces here"
        raise ValueError(
            f"{where}: no sandbox can be had on this machine. {str(error).rstrip('.')}. {remedy}."
        ) from None
    if ran.stdout.strip() != b"42":
        said = ran.stderr.decode(errors="replace").strip()[-300:]
        raise ValueError(
            f"A program of one line does not run in the sandbox of {where} ({ran.cause}): {said}. "
            f"Look at {where}.python, memory_mib, processes and cpu_seconds."
        )
