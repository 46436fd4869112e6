"""A Python interpreter in a sandbox, as a tool: the environment of the recipe `python-agent`."""

from __future__ import annotations

from configs.rewards import ProcessSandbox
from engines.sandboxes.opening import SupervisedSandbox, open_sandbox, python_of

_CHARACTERS = 2000  # of a program's output that the model is shown


class PythonSandbox:
    """An environment whose only tool runs programs, each episode in a sandbox of its own.

    Args:
        timeout: deadline of a program, in seconds.
        memory_mib: of a program, in MiB.
    """

    def __init__(self, timeout: float = 10.0, memory_mib: int = 512) -> None:
        self._settings = ProcessSandbox(timeout=timeout, memory_mib=memory_mib)
        self._sandbox: SupervisedSandbox | None = None

    def reset(self) -> str:
        """The row's question says all; a sandbox is started by the first program."""
        return ""

    def run_python(self, code: str) -> str:
        """Run a program in Python and read what it prints. Each program starts anew.

        Args:
            code: the program, which prints its results.
        """
        if self._sandbox is None:
            self._sandbox = open_sandbox(self._settings)
        program = [python_of(self._settings), "-I", "-"]
        ran = self._sandbox.exec(program, code.encode(), timeout=self._settings.timeout)
        printed = (ran.stdout + ran.stderr).decode(errors="replace").strip()
        if ran.cause != "ended":
            printed = f"{printed}\nThe program was stopped: {ran.cause}".strip()
        return printed[-_CHARACTERS:] or "The program printed nothing."

    def close(self) -> None:
        """End the sandbox."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None
