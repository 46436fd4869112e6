"""Starting sandboxes: commands, other users, and what is said where there can be none."""

from __future__ import annotations

import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from configs.rewards import ContainerSandbox, ProcessSandbox
from engines.sandboxes import opening
from engines.sandboxes.opening import SupervisedSandbox, command_of, lacking, open_sandbox, prove
from engines.sandboxes.protocol import SandboxFailed

ROOT = Path(__file__).parents[3]
NOBODY = 65534


def test_the_command_of_a_container() -> None:
    settings = ContainerSandbox(
        image="python:3.12", runtime="runsc", memory_mib=100, disk_mib=10, processes=20
    )
    command = command_of(settings, "refrain-x")
    assert command[:6] == ["docker", "run", "--rm", "--interactive", "--name", "refrain-x"]
    options = dict(itertools.pairwise(command))
    assert options["--network"] == "none" and options["--cap-drop"] == "ALL"
    assert options["--memory"] == options["--memory-swap"] == "174m"
    assert options["--pids-limit"] == "28" and options["--runtime"] == "runsc"
    assert options["--security-opt"] == "no-new-privileges" and options["--user"] == "65534:65534"
    assert "size=10m" in options["--tmpfs"] and "--read-only" in command
    assert options["--label"].endswith(f":{os.getpid()}") and options["--pull"] == "never"
    assert command[command.index("--entrypoint") :][:3] == [
        "--entrypoint",
        "python3",
        "python:3.12",
    ]
    assert "--runtime" not in command_of(ContainerSandbox(image="i"), "n")


def test_a_container_is_removed_by_its_name(container: SupervisedSandbox, docker: Path) -> None:
    container.close()
    first, last = docker.with_name("docker.log").read_text().splitlines()
    name = first.split("\t")[first.split("\t").index("--name") + 1]
    assert name.startswith("refrain-") and last.split("\t") == ["rm", "--force", name]


def test_what_is_said_where_there_is_no_sandbox(docker: Path) -> None:
    missing = ContainerSandbox(command=str(docker), image="missing:1")
    with pytest.raises(ValueError) as refused:
        prove(missing, "rewards.functions.0.sandbox")
    assert str(refused.value).startswith("rewards.functions.0.sandbox: no sandbox can be had")
    assert "No such image: missing:1" in str(refused.value) and "See that" in str(refused.value)
    assert docker.with_name("docker.log").read_text().splitlines()[-1].startswith("rm")
    with pytest.raises(SandboxFailed, match="no-docker cannot be started: No such file"):
        open_sandbox(ContainerSandbox(command="no-docker", image="i"))
    with pytest.raises(SandboxFailed, match="/no/python does not run"):
        open_sandbox(ProcessSandbox(python="/no/python"))


def test_machines_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "release", lambda: "5.4.0-42-generic")
    assert lacking() == "Sandboxes of processes need Linux 5.14 or newer; this is 5.4.0-42-generic."
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "x86_64 or aarch64; this is riscv64" in str(lacking())
    with pytest.raises(ValueError, match=r"riscv64\. Set here\.kind = container"):
        prove(ProcessSandbox(), "here")


def test_no_namespaces_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own refusal, as of a machine that lets its users make none."""
    refusing = dict(opening._sources())
    name = "engines.sandboxes.system_calls"
    refusing[name] += (
        "\ndef unshare(flags):\n    raise PermissionError(1, 'unshare: not permitted')\n"
    )
    monkeypatch.setattr(opening, "_sources", lambda: refusing)
    monkeypatch.setattr(shutil, "which", lambda name: None)  # bubblewrap would say it its own way
    with pytest.raises(ValueError, match=r"not permitted\. Set x\.kind = container, or let users"):
        prove(ProcessSandbox(), "x")


def test_it_ends_with_its_owner(sandbox: SupervisedSandbox) -> None:
    mark = f"owned-{os.getpid()}"
    code = f"""
        import os
        from configs.rewards import ProcessSandbox
        from engines.sandboxes.opening import open_sandbox, python_of
        settings = ProcessSandbox()
        opened = open_sandbox(settings)
        print("open", flush=True)
        opened.exec([python_of(settings), "-c", "import time; time.sleep(60)", "{mark}"])
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stdout=subprocess.PIPE
    )

    def running() -> list[int]:
        found = psutil.process_iter(["cmdline"])
        return [p.pid for p in found if mark in (p.info["cmdline"] or [])]

    try:
        assert owner.stdout is not None and owner.stdout.readline() == b"open\n"
        give_up = time.monotonic() + 30
        while not running() and time.monotonic() < give_up:
            time.sleep(0.02)
        assert running()
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    give_up = time.monotonic() + 30
    while running() and time.monotonic() < give_up:
        time.sleep(0.02)
    assert running() == []


AS_A_USER = """
import json, os
from configs.rewards import ProcessSandbox
from engines.sandboxes.opening import open_sandbox, python_of
settings = ProcessSandbox(memory_mib=192, processes=16)
with open_sandbox(settings) as sandbox:
    def run(code):
        return sandbox.exec([python_of(settings), "-I", "-S", "-c", code], timeout=20)
    forks = run('''
import os, time
made = 0
try:
    for made in range(200):
        if os.fork() == 0: time.sleep(60)
except OSError: print(made)
for path in ("/proc/1/environ", "/proc/1/mem", "/home", "/etc/passwd"):
    if os.access(path, os.R_OK): print("reads", path)
import resource
try: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)); print("limits")
except OSError: pass
try: os.kill(1, 9)
except OSError: pass
''')
    memory = run('import os, time\\nfor _ in range(3): os.fork()\\nx = b"x" * (48 * 2**20)\\ntime.sleep(60)')
    program = os.path.basename(sandbox._process.args[0])
    print(json.dumps([program, forks.stdout.decode(), memory.cause, run("print(1)").stdout.decode()]))
"""


@pytest.mark.parametrize("program", ["bwrap", "env"])
def test_another_user_than_root(program: str, sandbox: SupervisedSandbox, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("the other tests run as another user already")
    if program == "bwrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    python = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    packages = sysconfig.get_paths()["purelib"]
    path = "/usr/local/bin:/usr/bin:/bin" if program == "bwrap" else str(tmp_path)
    try:
        ran = subprocess.run(
            [python, "-c", AS_A_USER],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            env={"PYTHONPATH": f"{ROOT}:{packages}", "PATH": path},
            cwd="/",
            capture_output=True,
            text=True,
        )
    except OSError as error:
        pytest.skip(f"no interpreter for other users: {error}")
    if "ModuleNotFoundError" in ran.stderr:
        pytest.skip("other users cannot read this checkout or its packages")
    assert ran.returncode == 0, ran.stderr
    used, forks, cause, after = json.loads(ran.stdout)
    assert used == program and cause == "out_of_memory" and after == "1\n"
    assert int(forks) <= 16  # and nothing else was printed


def test_a_program_that_cannot_be_confined_is_no_result_of_it() -> None:
    """Its exit code would count as the program's own, and so as a test that it did not pass."""
    try:
        opened = open_sandbox(ProcessSandbox(cpu_seconds=2**70))
    except SandboxFailed as error:
        pytest.skip(str(error))
    with opened, pytest.raises(SandboxFailed, match="the program could not be confined"):
        opened.exec(["/bin/true"], timeout=5)


def test_a_supervisor_that_programs_could_look_into_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by a runtime that keeps no process from looking into another of its user."""
    looking = dict(opening._sources())
    name = "engines.sandboxes.system_calls"
    looking[name] += "\ndef is_hidden(user):\n    return False\n"
    monkeypatch.setattr(opening, "_sources", lambda: looking)
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    with pytest.raises(SandboxFailed, match="programs could look into their supervisor"):
        open_sandbox(ProcessSandbox())


def test_who_can_look_into_a_process_is_found() -> None:
    program = (
        "import os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from engines.sandboxes.system_calls import hide_memory, is_hidden\n"
        "if os.geteuid() == 0: os.setresuid(65534, 65534, 65534)\n"
        "from engines.processes.parent_death import prctl\n"
        "prctl(4, 1)\n"  # PR_SET_DUMPABLE, which a change of user takes away
        "before = is_hidden(None)\n"
        "hide_memory()\n"
        "print(before, is_hidden(None))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.split() == ["False", "True"], ran.stderr
