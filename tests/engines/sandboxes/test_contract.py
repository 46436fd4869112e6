"""What every sandbox does, whatever it is made of."""

from __future__ import annotations

import time

import pytest

from engines.sandboxes.opening import SupervisedSandbox
from engines.sandboxes.protocol import SandboxFailed
from tests.engines.sandboxes.conftest import python


@pytest.fixture(params=["sandbox", "container"])
def any_sandbox(request: pytest.FixtureRequest, sandbox: SupervisedSandbox) -> SupervisedSandbox:
    found: SupervisedSandbox = request.getfixturevalue(request.param)
    return found


def test_files_programs_and_their_ends(any_sandbox: SupervisedSandbox) -> None:
    any_sandbox.write("in/data.bin", bytes(range(256)))
    ran = any_sandbox.exec(
        python(
            any_sandbox,
            "import sys; data = open('in/data.bin', 'rb').read()\n"
            "open('in/out.bin', 'wb').write(data[::-1]); print(sys.stdin.read().upper())\n"
            "print('told', file=sys.stderr); sys.exit(3)",
        ),
        b"hello",
    )
    assert (ran.cause, ran.exit_code, ran.signal) == ("ended", 3, None)
    assert (ran.stdout, ran.stderr, ran.truncated) == (b"HELLO\n", b"told\n", False)
    assert any_sandbox.read("in/out.bin", 1000) == bytes(range(256))[::-1]
    assert any_sandbox.read("in/out.bin", 2) == b"\xff\xfe"

    aborted = any_sandbox.exec(python(any_sandbox, "import os; os.abort()"))
    assert (aborted.cause, aborted.exit_code, aborted.signal) == ("killed", None, 6)
    nothing = any_sandbox.exec(["no-such-program"])
    assert nothing.exit_code == 127 and b"no-such-program was not started" in nothing.stderr

    for path in ("../out", "/etc/out", "in", ""):
        with pytest.raises(ValueError, match=r"not below the working folder|cannot be written"):
            any_sandbox.write(path, b"")
    any_sandbox.exec(
        python(any_sandbox, "import os; os.symlink('/proc/1/environ', 'link'); os.mkfifo('pipe')")
    )
    for path in ("link", "pipe", "absent", "in"):
        with pytest.raises(ValueError, match=r"cannot be read|is no file"):
            any_sandbox.read(path, 10)
    assert any_sandbox.exec(python(any_sandbox, "print(1)")).stdout == b"1\n"


def test_a_program_that_hangs_and_one_that_prints_without_end(
    any_sandbox: SupervisedSandbox,
) -> None:
    began = time.monotonic()
    hung = any_sandbox.exec(
        python(any_sandbox, "print('before', flush=True)\nwhile True: pass"), timeout=0.7
    )
    assert (hung.cause, hung.exit_code, hung.stdout) == ("timed_out", None, b"before\n")
    assert time.monotonic() - began < 15
    endless = any_sandbox.exec(python(any_sandbox, "while True: print('x' * 1000)"), timeout=0.7)
    assert (endless.cause, endless.truncated) == ("timed_out", True)
    assert len(endless.stdout) == 64 * 1024 and set(endless.stdout) == {ord("x"), ord("\n")}
    # Nobody reads this one's input, and it leaves its output to a child.
    left = any_sandbox.exec(
        python(
            any_sandbox,
            "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'])",
        ),
        b"x" * 10**6,
    )
    assert left.cause == "ended" and left.exit_code == 0


def test_what_is_closed_says_so(container: SupervisedSandbox) -> None:
    container.close()
    with pytest.raises(SandboxFailed, match="has been closed"):
        container.exec(python(container, "print(1)"))
    container.close()
