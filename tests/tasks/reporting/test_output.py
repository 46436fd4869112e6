"""A command whose output nobody reads any more ends without a traceback; a run goes on."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.reporting.output import until_nobody_reads

ROOT = Path(__file__).parents[3]
COMMANDS = sorted(
    path.stem for path in (ROOT / "flows").glob("[!_]*.py") if "__main__" in path.read_text()
)


def into_a_closed_pipe(*command: str, folder: Path = ROOT) -> tuple[int, str]:
    """Exit code and standard error of a program whose reader is gone before it begins."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, *command],
            stdout=writer,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
            timeout=120,
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


SOME = {"grpo", "samples", "cluster", "deploy", "serve", "teacher", "evaluate", "servers"}


@pytest.mark.parametrize("name", sorted(SOME & set(COMMANDS)))
def test_help_into_a_closed_pipe_says_nothing(name: str) -> None:
    code, err = into_a_closed_pipe("-m", f"flows.{name}", "--help")
    assert (code in (0, 141), err) == (True, "")


def test_the_list_of_commands_into_a_closed_pipe_says_nothing() -> None:
    assert into_a_closed_pipe("-m", "flows", "--help") == (141, "")


def test_a_table_into_a_closed_pipe_says_nothing() -> None:
    program = (
        "from tasks.reporting.output import until_nobody_reads\n"
        "import sys\n"
        "@until_nobody_reads\n"
        "def main():\n"
        "    for n in range(100000): print(n)\n"
        "    return 0\n"
        "sys.exit(main())\n"
    )
    assert into_a_closed_pipe("-c", program) == (141, "")


def test_lines_of_a_run_go_to_standard_error_then() -> None:
    program = (
        "from tasks.reporting.terminal import Terminal\n"
        "terminal = Terminal()\n"
        "for step in (1, 2): terminal.say(f'step {step}')\n"
    )
    code, err = into_a_closed_pipe("-c", program)
    assert code == 0
    assert err.splitlines() == [
        "step 1", "Nobody reads standard output any more; what is printed goes here.", "step 2",
    ]  # fmt: skip


def test_another_broken_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    @until_nobody_reads
    def main() -> int:
        raise BrokenPipeError("a worker's")

    with open(os.devnull, "w") as out, pytest.raises(BrokenPipeError, match="a worker's"):
        monkeypatch.setattr(sys, "stdout", out)
        main()


def test_output_that_is_no_file_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where pytest captures it."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)

    def main() -> int:
        print("here")
        return 0

    assert until_nobody_reads(main)() == 0
    assert out.getvalue() == "here\n"
