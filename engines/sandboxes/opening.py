"""Sandboxes from outside: how they are opened from settings, and given programs.

Of processes: namespaces of this machine's kernel. Root and, where bubblewrap is not installed,
anybody enters them directly (engines/sandboxes/namespaces.py). Other users take bubblewrap where
there is one: some distributions let it make user namespaces, and nothing else.

Of containers: Docker or Podman, by command. The image needs Python and nothing else. The container's
own limits hold besides, somewhat wider, for what the supervisor cannot see.

In both the first process is Python, and the same supervisor (engines/sandboxes/supervisor.py), so
programs, limits and output are handled alike. It gets the modules that it needs as text through its
standard input: nothing of this program has to be visible there.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import platform
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from configs.rewards import GRACE, START_SECONDS, ContainerSandbox, ProcessSandbox, SandboxLimits
from engines.sandboxes.protocol import Executed, SandboxFailed, framed, received
from engines.sandboxes.system_calls import MACHINES

PROOF = b"print(6 * 7)"
END_SECONDS = 5.0  # in which a sandbox ends by itself when its owner leaves
_ERROR_CHARACTERS = 500  # characters of an error output that are repeated
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
_PREFIXES = (
    "import json, os, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.exec_prefix, "
    "*(os.path.dirname(os.path.dirname(p)) for p in (sys.executable, os.path.realpath("
    "sys.executable)))]))"
)
CONTAINER_USER = "65534:65534"
SUPERVISOR_MIB = 64  # of the supervisor, and for what the kernel counts besides
SUPERVISOR_PROCESSES = 8  # of the supervisor, and of the runtime
REMOVE_SECONDS = 30.0
LABEL = "refrain.owner"  # HOST:PID of the process that started it; finds what outlived its owner

# What runs in the sandbox, in the order in which it is loaded.
MODULES = (
    "engines.processes.parent_death",
    "engines.sandboxes.protocol",
    "engines.sandboxes.system_calls",
    "engines.sandboxes.supervisor",
    "engines.sandboxes.namespaces",
)

LOADER = """
import json, os, sys, types
def message():
    def exactly(size):
        data = b""
        while len(data) < size:
            piece = os.read(0, size - len(data))
            if not piece:
                os._exit(1)
            data += piece
        return data
    return json.loads(exactly(int.from_bytes(exactly(4), "big")))
first = message()
for name, text in first["modules"].items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
sys.modules[first["main"]].main(first["setup"])
"""


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
            executed = sandbox.exec([python_of(settings), "-I", "-"], PROOF)
    except SandboxFailed as error:
        if isinstance(settings, ContainerSandbox):
            remedy = f"See that {settings.command} runs and has the image {settings.image}"
        else:
            remedy = f"Set {where}.kind = container, or let users make user namespaces here"
        raise ValueError(
            f"{where}: no sandbox can be had on this machine. {str(error).rstrip('.')}. {remedy}."
        ) from None
    if executed.stdout.strip() != b"42":
        errors = executed.stderr.decode(errors="replace").strip()[-300:]
        raise ValueError(
            f"A program of one line does not run in the sandbox of {where} ({executed.cause}): "
            f"{errors}. Look at {where}.python, memory_mib, processes and cpu_seconds."
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
    kernel = re.match(r"(\d+)\.(\d+)", platform.release())
    if kernel is None or tuple(map(int, kernel.groups())) < LEAST_KERNEL:
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
            [python, "-I", "-c", _PREFIXES], capture_output=True, timeout=START_SECONDS, check=True
        )
        folders = sorted({os.path.normpath(path) for path in json.loads(done.stdout)}, key=len)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SandboxFailed(f"The interpreter {python} does not run: {error}") from None
    if "/" in folders:
        folders.remove("/")
    outermost: list[str] = []
    for path in folders:
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
    memory = f"{settings.memory_mib + settings.disk_mib + SUPERVISOR_MIB}m"
    command = [settings.command, "run", "--rm", "--interactive", "--name", name]
    command += ["--label", f"{LABEL}={socket.gethostname()}:{os.getpid()}"]
    command += ["--pull", "never", "--network", "none", "--ipc", "private"]
    command += ["--memory", memory, "--memory-swap", memory]
    command += ["--pids-limit", str(settings.processes + SUPERVISOR_PROCESSES)]
    command += ["--read-only", "--shm-size", "1m"]
    command += ["--tmpfs", f"/tmp:rw,exec,nosuid,nodev,size={settings.disk_mib}m,mode=1777"]
    command += [
        "--cap-drop",
        "ALL",
        "--security-opt",
        "no-new-privileges",
        "--user",
        CONTAINER_USER,
    ]
    if settings.runtime is not None:
        command += ["--runtime", settings.runtime]
    command += ["--entrypoint", settings.python, settings.image]
    return [*command, "-I", "-S", "-B", "-c", LOADER]


@cache
def _sources() -> dict[str, str]:
    sources = {}
    for name in MODULES:
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None, name
        sources[name] = Path(spec.origin).read_text()
    return sources


class SupervisedSandbox:
    """A `Sandbox` (engines/sandboxes/protocol.py) behind a command. A context; or close it."""

    def __init__(
        self,
        command: Sequence[str],
        main: str,
        setup: Mapping[str, Any],
        limits: SandboxLimits,
        start_seconds: float,
        remove: Callable[[], None] | None = None,
    ) -> None:
        """Start it. SandboxFailed, with what the command said, when it is not ready in time.

        Args:
            command: starts Python in the sandbox; LOADER and arguments of Python stand at its end.
            main: of MODULES, the one whose `main` is called there.
            setup: its argument, besides the limits.
            limits: of each program.
            start_seconds: deadline of the start.
            remove: called once at the end; cleans up where the end of the command does not.
        """
        self._limits = limits
        self._remove = remove
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as this object)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                # Of its own file system, which nobody else reaches; programs may be another user.
                umask=0o022,
                cwd=tempfile.gettempdir(),  # Podman leaves a file there when memory runs out
            )
        except OSError as error:
            self.close()
            raise SandboxFailed(f"{command[0]} cannot be started: {error.strerror}") from None
        numbers = limits.model_dump(include=set(SandboxLimits.model_fields))
        first = {
            "modules": _sources(),
            "main": main,
            "setup": {"user": None, "ours": 1, **setup, "limits": numbers},
        }
        self._ask(first, start_seconds)

    def write(self, path: str, data: bytes) -> None:
        """As `Sandbox.write`."""
        self._ask({"do": "write", "path": path, "data": _text(data)}, self._limits.timeout)

    def exec(
        self, argv: Sequence[str], stdin: bytes = b"", timeout: float | None = None
    ) -> Executed:
        """As `Sandbox.exec`."""
        seconds = self._limits.timeout if timeout is None else timeout
        order = {"do": "exec", "argv": list(argv), "stdin": _text(stdin), "timeout": seconds}
        answer = self._ask(order, seconds)
        for name in ("stdout", "stderr"):
            answer[name] = base64.b64decode(answer[name])
        return Executed(**answer)

    def read(self, path: str, limit: int) -> bytes:
        """As `Sandbox.read`."""
        order = {"do": "read", "path": path, "limit": limit}
        return base64.b64decode(self._ask(order, self._limits.timeout)["data"])

    def close(self) -> None:
        """As `Sandbox.close`; may be called again."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(END_SECONDS)  # with it all of the sandbox has ended
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self._errors.close()
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()

    def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a message. ValueError if it was refused; SandboxFailed, and it is over."""
        process = self._process
        if process is None:
            raise SandboxFailed("The sandbox has been closed.")
        assert process.stdin is not None and process.stdout is not None
        give_up = time.monotonic() + seconds + GRACE
        try:
            _send(process.stdin.fileno(), framed(message), give_up)
            answer = received(lambda size: _read(process.stdout.fileno(), size, give_up))  # type: ignore[union-attr]
        except TimeoutError:
            raise self._lost(f"The sandbox did not answer within {seconds + GRACE:g} s") from None
        except (EOFError, OSError, json.JSONDecodeError):
            raise self._lost("The sandbox has ended") from None
        if "refused" in answer:
            raise ValueError(answer["refused"])
        if "failed" in answer:
            raise self._lost(f"The sandbox failed: {answer['failed']}")
        return answer

    def _lost(self, text: str) -> SandboxFailed:
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
        self._errors.seek(0)
        said = " ".join(self._errors.read(10 * _ERROR_CHARACTERS).decode(errors="replace").split())[
            -_ERROR_CHARACTERS:
        ]
        self.close()
        return SandboxFailed(f"{text}. {said}".rstrip() if said else f"{text}.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _wait(descriptor: int, event: int, give_up: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(give_up - time.monotonic(), 0) * 1000):
        raise TimeoutError


def _send(descriptor: int, data: bytes, give_up: float) -> None:
    rest = memoryview(data)
    os.set_blocking(descriptor, False)
    while rest:
        _wait(descriptor, select.POLLOUT, give_up)
        with contextlib.suppress(BlockingIOError):
            rest = rest[os.write(descriptor, rest) :]


def _read(descriptor: int, size: int, give_up: float) -> bytes:
    _wait(descriptor, select.POLLIN, give_up)
    return os.read(descriptor, size)
