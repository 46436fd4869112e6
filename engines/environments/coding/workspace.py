"""A workspace: a row's repository in a sandbox, with a shell and files, for one episode.

Runs in the process of the environments, which may have another interpreter: of other packages only
pydantic is imported, which the sandbox's settings need.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from configs.coding import WorkspaceConfig
from engines.environments.coding.judging import (
    FOLDER,
    CodingTask,
    Judged,
    Unusable,
    judged,
    opened,
    shell,
)
from engines.environments.coding.sandbox_files import TooMuch, taken_out
from engines.sandboxes.opening import python_of
from engines.sandboxes.protocol import WORK, Sandbox, SandboxFailed

_ROWS = 4096  # of which a process remembers that their tests judge
_judging: set[tuple[str, ...]] = set()
# What a command prints that is another thing each time: how long tests took, and where objects lie.
_SECONDS = re.compile(r"\b(in )\d+\.\d+( ?s(?:econds?)?\b)")
_ADDRESS = re.compile(r"( at )0x[0-9a-f]{6,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a command ended, as an agent is told it."""

    output: str  # with its errors, in order; without what is another thing each time
    exit_code: int | None  # None where it was stopped
    stopped: str  # a sentence; empty where it ended by itself


class Workspace:
    """The repository of a row, and what an agent does in it. Safe to use from several threads.

    A command that the sandbox could not run because the machine failed raises SandboxFailed, and so
    does all that comes after it: the episode has no reward.
    """

    def __init__(self, settings: WorkspaceConfig, row: Mapping[str, Any]) -> None:
        """Open it. Unusable, a sentence, where the row's files, set-up or tests are at fault."""
        self._settings = settings
        self._task = task = CodingTask.of(row)
        key = tuple(
            str(row[column])
            for column in ("repository", "tests", "fail_to_pass", "pass_to_pass", "setup", "layout")
        )
        if key not in _judging:
            check_judges(settings, task)
            if len(_judging) >= _ROWS:
                _judging.clear()
            _judging.add(key)
        self._lock = threading.Lock()
        self._sandbox: Sandbox | None = opened(settings, task)

    def run(self, command: str, timeout: float | None = None) -> Ran:
        """Run a command in the repository's folder, for at most so many seconds."""
        limits = self._settings.sandbox
        seconds = limits.timeout if timeout is None else min(timeout, limits.timeout)
        with self._lock:
            ran = shell(self._open, self._settings, self._task, command, seconds)
        text = ran.stdout.decode(errors="replace")
        text = _ADDRESS.sub(r"\g<1>0x0", _SECONDS.sub(r"\g<1>0.00\g<2>", text)).rstrip("\n")
        stopped = {
            "timed_out": f"The command was stopped after {seconds:g} s.",
            "out_of_memory": f"The command was stopped: it used more than {limits.memory_mib} MiB.",
            "killed": f"The command was ended by signal {ran.signal}.",
            "ended": "",
        }[ran.cause]
        return Ran(output=self._cut(text, ran.truncated), exit_code=ran.exit_code, stopped=stopped)

    def bash(self, command: str) -> str:
        """Run a command in the repository's folder: its output, and how it ended if not well."""
        ran = self.run(command)
        said = f"Exit status {ran.exit_code}." if ran.exit_code else ran.stopped
        return "\n".join(filter(None, (ran.output, said))) or "The command printed nothing."

    def read(self, path: str) -> str:
        """The text of a file; ValueError, a sentence, if there is none."""
        with self._lock:
            data = self._open.read(self._inside(path), 4 * self._settings.output_characters + 1)
        return self._cut(data.decode(errors="replace"))

    def write(self, path: str, text: str) -> None:
        """Write a file, and the folders on its way; ValueError where that is not possible."""
        with self._lock:
            self._open.write(self._inside(path), text.encode(errors="replace"))

    def edit(self, path: str, old: str, new: str) -> None:
        """Put `new` in the place of `old`, which stands in a file once; ValueError otherwise."""
        with self._lock:
            place, most = self._inside(path), self._settings.sandbox.disk_mib * 2**20
            text = self._open.read(place, most).decode(errors="surrogateescape")
            if (times := text.count(old) if old else 0) != 1:
                raise ValueError(f"the text to replace stands {times} times in {path}, not once")
            data = text.replace(old, new).encode(errors="surrogateescape")
            self._open.write(place, data)

    def judge(self) -> Judged:
        """What the row's tests come to on the files as they are; in a sandbox of its own."""
        with self._lock:
            python = python_of(self._settings.sandbox)
            try:
                left = taken_out(self._open, python, FOLDER, self._task.repository)
            except TooMuch as error:
                return Judged(reward=0.0, outcomes=dict.fromkeys(self._task.names, str(error)))
        return judged(self._settings, self._task, left)

    def reward(self) -> float:
        """The reward of the files as they are."""
        return self.judge().reward

    def close(self) -> None:
        """End the sandbox, with all that is in it."""
        with self._lock:
            sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.close()

    @property
    def _open(self) -> Sandbox:
        if self._sandbox is None:
            raise SandboxFailed("The workspace has been closed.")
        return self._sandbox

    def _inside(self, path: str) -> str:
        """A path of the repository, as the sandbox has it."""
        for folder in (f"{WORK}/{FOLDER}", self._task.layout.folder):
            path = path.removeprefix(f"{folder}/")
        if path.startswith("/"):
            raise ValueError(f"{path} is not below {self._task.layout.folder}")
        return f"{FOLDER}/{path}"

    def _cut(self, text: str, more: bool = False) -> str:
        most = self._settings.output_characters
        if len(text) <= most and not more:
            return text
        if len(text) <= most:
            return f"{text}\n[All that came after this was left out.]"
        half = most // 2
        left = len(text) - 2 * half
        return f"{text[:half]}\n[{left} characters were left out here.]\n{text[-half:]}"


def check_judges(settings: WorkspaceConfig, task: CodingTask) -> None:
    """Unusable where fail_to_pass passes before any change, or pass_to_pass does not."""
    left = task.repository
    if task.setup:
        with opened(settings, task) as sandbox:
            left = taken_out(sandbox, python_of(settings.sandbox), FOLDER, left)
    found = judged(settings, task, left)
    for name in task.pass_to_pass:
        if found.outcomes[name] != "passed":
            raise Unusable(
                f"of pass_to_pass {name} does not pass before any change: {found.outcomes[name]}"
            )
    if task.layout.reward is None:
        done = all(found.outcomes[name] == "passed" for name in task.fail_to_pass)
    else:
        done = found.reward == 1.0
    if done:
        raise Unusable("fail_to_pass passes before any change, and so judges nothing")
