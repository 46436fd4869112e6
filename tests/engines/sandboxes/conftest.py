"""A sandbox of processes, or a reason why this machine has none; a program that stands in for docker.

With REFRAIN_TEST_CONTAINERS="podman IMAGE", the command and an image with Python, the tests run in real
containers too; "docker IMAGE runsc" names a runtime besides.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.rewards import ContainerSandbox, ProcessSandbox, SandboxConfig
from engines.sandboxes.opening import SupervisedSandbox, interpreter, open_container, open_sandbox
from engines.sandboxes.protocol import SandboxFailed

LIMITS = {"memory_mib": 192, "processes": 16, "disk_mib": 8, "output_kib": 64, "timeout": 20.0}

# It takes the calls that are made of docker, writes them down, and gives a "container" a process
# namespace and a /tmp of its own, which is what the supervisor insists on.
DOCKER = """#!{python}
import os, sys
with open({log!r}, "a") as log:
    log.write("\\t".join(word for word in sys.argv[1:] if "\\n" not in word) + "\\n")
if sys.argv[1] == "run":
    arguments = sys.argv[2:]
    if "missing:1" in arguments:
        sys.exit("docker: Error: No such image: missing:1")
    start = arguments.index("--entrypoint")
    own = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    os.execvp("unshare", ["unshare", *own, "--mount", "--pid", "--fork", "--kill-child",
              "--mount-proc", "sh", "-c", 'mount -t tmpfs none /tmp && exec "$@"', "sh",
              arguments[start + 1], *arguments[start + 3:]])
"""


REAL = os.environ.get("REFRAIN_TEST_CONTAINERS", "").split()
IN_IMAGE = "python3"  # its interpreter
_REAL_SETTINGS: dict[str, Any] = dict(zip(("command", "image", "runtime"), REAL, strict=False))
_interpreters: dict[int, str] = {}  # of sandboxes that have another than this machine's


def settings_of(kind: str, **limits: Any) -> SandboxConfig:
    """Of a sandbox of processes, or of a real container."""
    if kind == "processes":
        return ProcessSandbox(**limits)
    return ContainerSandbox(**_REAL_SETTINGS, python=IN_IMAGE, **limits)


@pytest.fixture(scope="module", params=["processes", *(["containers"] if REAL else [])])
def sandbox(request: pytest.FixtureRequest) -> Iterator[SupervisedSandbox]:
    try:
        opened = open_sandbox(settings_of(request.param, **LIMITS))
    except SandboxFailed as error:
        if request.param == "containers":
            raise
        pytest.skip(str(error))
    with opened:
        if request.param == "containers":
            _interpreters[id(opened)] = IN_IMAGE
        yield opened


def is_container(sandbox: SupervisedSandbox) -> bool:
    """Whether it is a real one."""
    return id(sandbox) in _interpreters


def python(sandbox: SupervisedSandbox, code: str, *arguments: str) -> list[str]:
    """The words of a program for a sandbox."""
    return [_interpreters.get(id(sandbox), interpreter()), "-I", "-S", "-c", code, *arguments]


@pytest.fixture
def docker(tmp_path: Path) -> Path:
    """The program; it writes its calls to docker.log beside it."""
    program = tmp_path / "docker"
    log = str(tmp_path / "docker.log")
    program.write_text(DOCKER.format(python=sys.executable, log=log))
    os.chmod(program, stat.S_IRWXU)
    return program


@pytest.fixture
def container(sandbox: SupervisedSandbox, docker: Path) -> Iterator[SupervisedSandbox]:
    """One of the program above; where there are no namespaces it has none either."""
    settings = ContainerSandbox(
        command=str(docker), image="python:3.12", python=interpreter(), **LIMITS
    )
    with open_container(settings) as opened:
        yield opened


@pytest.fixture(autouse=True)
def umask_of_a_run() -> Iterator[None]:
    """As a run's workers have it: nothing is open to other users, of whom a program may be one."""
    before = os.umask(0o077)
    yield
    os.umask(before)
