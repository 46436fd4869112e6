"""Whether what an agent left passes its tests: in a sandbox that the agent never saw.

The files that count there are not the agent's: tests, what stands in their folders, conftest.py
and pytest's settings are those of the row. Tests that are named one by one are run by a program of
ours (testing.py), commands by a shell. Among the tests stands one that has to fail, under a name that
nobody knows before: where it passes, passing says nothing.

Code that is tested shares a process with its tests, as everywhere: what was written to deceive this
very program can. docs/coding-tasks.md says what cannot.
"""

from __future__ import annotations

import configparser
import json
import posixpath
import re
import secrets
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from configs.coding import WorkspaceConfig
from engines.environments.coding.sandbox_files import TooMuch, put
from engines.environments.contract import NotAllowed
from engines.sandboxes.opening import SupervisedSandbox, open_sandbox, python_of
from engines.sandboxes.protocol import WORK, Executed, Sandbox, SandboxFailed
from storage.prompts.coding.trees import File, Missing, Tree, kept, overlaid

FOLDER = "repository"  # below the working folder of a sandbox
TESTS = "tests"
SETTINGS = f"{WORK}/settings.ini"
REWARD_BYTES = 64
_TEST = re.compile(r"\S+\.py(::\S.*)?")
_CANARY = b"""import unittest
class It(unittest.TestCase):
    def test_it(self):
        raise AssertionError
"""  # a class of unittest is collected whatever pytest's settings


class Unusable(NotAllowed):
    """The row is at fault: its files are gone, its set-up fails, or its tests judge nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where a task has its files; of rows that say nothing the repository is below /tmp."""

    folder: str = f"{WORK}/{FOLDER}"  # the repository, also by this path
    tests: str | None = None  # a folder of its own; None: tests are laid over the repository
    reward: str | None = None  # file that the command writes
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def links(self) -> dict[str, str]:
        """Paths of the system, and where they lead."""
        found = {} if self.folder.startswith("/tmp/") else {self.folder: f"{WORK}/{FOLDER}"}
        if self.tests is not None:
            found[self.tests] = f"{WORK}/{TESTS}"
        if self.reward is not None:
            found[f"/{self.reward.split('/')[1]}"] = f"{WORK}/{self.reward.split('/')[1]}"
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingTask:
    """A row, as an environment has it."""

    repository: Tree
    tests: Tree
    fail_to_pass: Sequence[str]
    pass_to_pass: Sequence[str]
    setup: str
    test_timeout: float | None
    layout: Layout

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> CodingTask:
        """Of a row of a coding source; Unusable for another."""
        try:
            layout = Layout(**(row["layout"] or {}))
            found = cls(
                repository=kept(row["repository"]),
                tests=kept(row["tests"]),
                fail_to_pass=row["fail_to_pass"],
                pass_to_pass=row["pass_to_pass"],
                setup=row["setup"],
                test_timeout=row["test_timeout"],
                layout=layout,
            )
        except Missing as error:
            raise Unusable(str(error)) from None
        except (KeyError, TypeError):
            raise Unusable(
                "the row is no coding task. Set data.source.kind = coding, whose rows have a "
                "repository and tests"
            ) from None
        there = {**found.repository, **found.tests}
        for path in files_of_tests(found):
            if layout.tests is None and path not in there:
                raise Unusable(f"the row names tests of {path}, and has no such file")
        return found

    @property
    def names(self) -> list[str]:
        """Of all that has to pass."""
        return [*self.fail_to_pass, *self.pass_to_pass]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What the tests came to."""

    reward: float
    outcomes: Mapping[str, str]  # of each of fail_to_pass and pass_to_pass: "passed", or why not


def opened(settings: WorkspaceConfig, task: CodingTask) -> SupervisedSandbox:
    """A sandbox with the repository as it is after the set-up; close it.

    Unusable where the repository or its set-up is at fault, SandboxFailed where the machine is.
    """
    sandbox = open_sandbox(settings.sandbox, task.layout.links)
    try:
        put(sandbox, python_of(settings.sandbox), FOLDER, task.repository)
        if task.setup:
            ran = shell(sandbox, settings, task, task.setup, _seconds(settings, task))
            if ran.exit_code != 0:
                said = (ran.stdout.decode(errors="replace").strip() or ran.cause)[-300:]
                raise Unusable(f"the set-up of the row fails: {said}")
    except TooMuch as error:
        sandbox.close()
        raise Unusable(f"{error}. Set episodes.workspace.sandbox.disk_mib higher") from None
    except BaseException:
        sandbox.close()
        raise
    return sandbox


def shell(
    sandbox: Sandbox, settings: WorkspaceConfig, task: CodingTask, command: str, seconds: float
) -> Executed:
    """Run a command in the folder of the repository; its errors are in its output, in order."""
    python = python_of(settings.sandbox)
    path = "/usr/local/bin:/usr/bin:/bin"
    if python.startswith("/"):
        path = f"{posixpath.dirname(python)}:{path}"
    variables = {"PATH": path, "TZ": "UTC", **task.layout.variables}
    words = ["env", *(f"{name}={value}" for name, value in variables.items())]
    start = 'cd "$1" && exec "$(command -v bash || echo sh)" -c "$2" 2>&1'
    words += ["sh", "-c", start, "sh", task.layout.folder, command]
    return sandbox.exec(words, timeout=seconds)


def judged(settings: WorkspaceConfig, task: CodingTask, left: Tree) -> Judged:
    """Run the tests of a task on the tree that an agent left.

    Unusable and SandboxFailed as of `opened`: then there is no reward.
    """
    canary = f"test_{secrets.token_hex(6)}.py"
    with_tests = tree_to_test(task, left, canary)
    python = python_of(settings.sandbox)
    sandbox = opened(settings, task)  # the set-up sees the files as they were
    try:
        try:
            put(sandbox, python, FOLDER, with_tests)
            put(sandbox, python, TESTS, task.tests if task.layout.tests is not None else {})
        except TooMuch as error:
            return Judged(reward=0.0, outcomes=dict.fromkeys(task.names, str(error)))
        ending = time.monotonic() + _seconds(settings, task)
        outcomes = _by_name(sandbox, settings, task, canary, ending)
        for command in [name for name in task.names if not _TEST.fullmatch(name)]:
            left_over = ending - time.monotonic()
            if left_over <= 0:
                outcomes[command] = "not reached: timed out"
                continue
            if task.layout.reward is not None:
                put(sandbox, python, task.layout.reward.split("/")[1], {})
                _make_folder(sandbox, python, posixpath.dirname(task.layout.reward))
            ran = shell(sandbox, settings, task, command, left_over)
            passed = ran.exit_code == 0
            said = ran.stdout.decode(errors="replace").strip()[-300:]
            outcomes[command] = "passed" if passed else f"{ran.cause}: {said}"
        if task.layout.reward is not None:
            return Judged(reward=_written(sandbox, task.layout.reward), outcomes=outcomes)
    finally:
        sandbox.close()
    return Judged(reward=_score(settings, task, outcomes), outcomes=outcomes)


def _seconds(settings: WorkspaceConfig, task: CodingTask) -> float:
    return min(settings.test_timeout, task.test_timeout or settings.test_timeout)


def _score(settings: WorkspaceConfig, task: CodingTask, outcomes: Mapping[str, str]) -> float:
    fail = [outcomes[name] == "passed" for name in task.fail_to_pass]
    if not all(outcomes[name] == "passed" for name in task.pass_to_pass):
        return 0.0
    return sum(fail) / len(fail) if settings.score == "share" else float(all(fail))


def _written(sandbox: Sandbox, path: str) -> float:
    """The reward that a command wrote; 0 for none."""
    try:
        found = float(sandbox.read(path.lstrip("/"), REWARD_BYTES))
    except ValueError:
        return 0.0
    return found if 0.0 <= found <= 1.0 else 0.0


def _make_folder(sandbox: Sandbox, python: str, path: str) -> None:
    code = "import os, sys; os.makedirs(sys.argv[1], exist_ok=True)"
    sandbox.exec([python, "-I", "-S", "-c", code, path.lstrip("/")])


def tree_to_test(task: CodingTask, left: Tree, canary: str) -> Tree:
    """What an agent left, with everything that tests go by as the row has it.

    canary: name of a file with a test that fails, which stands beside the others.
    """
    over = {} if task.layout.tests is not None else task.tests
    trusted = overlaid(task.repository, over)
    paths = files_of_tests(task)
    if not paths:
        return _restored(left, over, trusted, set())
    folders = {posixpath.dirname(path) for path in paths} - {""}
    found = _restored(left, over, trusted, folders)
    beside = posixpath.join(posixpath.dirname(paths[0]), canary)
    if task.layout.tests is None:
        own = {path: trusted[path] for path in paths}
        return overlaid(found, {**own, beside: File(_CANARY)})
    return overlaid(found, {canary: File(_CANARY)})


def files_of_tests(task: CodingTask) -> list[str]:
    """Paths in the repository of the tests that are named one by one."""
    named = [one for one in task.names if _TEST.fullmatch(one)]
    return list(dict.fromkeys(posixpath.normpath(one.partition("::")[0]) for one in named))


def _restored(left: Tree, over: Tree, trusted: Tree, folders: set[str]) -> Tree:
    def is_of_tests(path: str) -> bool:
        name = posixpath.basename(path)
        return (
            name == "conftest.py"
            or (path in _SETTINGS and path in settings)
            or any(path.startswith(f"{folder}/") for folder in folders)
            or path in folders  # a file or a link in the place of such a folder
        )

    settings = set(_settings_files(trusted)) or set(_SETTINGS[:2])
    kept_files = {path: one for path, one in left.items() if not is_of_tests(path)}
    back = {path: one for path, one in trusted.items() if is_of_tests(path)}
    return overlaid(overlaid(kept_files, back), over)


# Files in which pytest looks for settings, in its order, with what has to be in them.
_SETTINGS = ("pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")


def _settings_files(tree: Tree) -> Iterable[str]:
    """The file with pytest's settings in a tree, if there is one."""
    for path in _SETTINGS:
        one = tree.get(path)
        if isinstance(one, File) and _has_settings(path, one.data.decode(errors="replace")):
            return [path]
    return []


def _has_settings(path: str, text: str) -> bool:
    try:
        if path == "pyproject.toml":
            return "pytest" in tomllib.loads(text).get("tool", {})
        if path.endswith("pytest.ini"):
            return True
        parser = configparser.RawConfigParser(strict=False)
        parser.read_string(text)
    except (tomllib.TOMLDecodeError, configparser.Error):
        return False
    return parser.has_section("pytest" if path == "tox.ini" else "tool:pytest")


@cache
def _program() -> str:
    spec = find_spec("engines.environments.coding.testing")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text()


def _by_name(
    sandbox: Sandbox, settings: WorkspaceConfig, task: CodingTask, canary: str, ending: float
) -> dict[str, str]:
    """The outcomes of the tests that are named one by one."""
    named = [one for one in task.names if _TEST.fullmatch(one)]
    if not named:
        return {}
    places = {name: _place(task, name) for name in named}
    first = posixpath.dirname(places[named[0]].partition("::")[0])
    proof = f"{first if task.layout.tests is None else FOLDER}/{canary}"
    config = next(iter(_settings_files(overlaid(task.repository, task.tests))), None)
    if config is None:
        sandbox.write("settings.ini", b"[pytest]\n")
    word = secrets.token_hex(16)
    asked = {
        "word": word,
        "ids": [f"{WORK}/{place}" for place in [*dict.fromkeys(places.values()), proof]],
        "root": WORK,
        "folder": f"{WORK}/{FOLDER}",
        "settings": SETTINGS if config is None else f"{WORK}/{FOLDER}/{config}",
    }
    ran = sandbox.exec(
        [python_of(settings.sandbox), "-I", "-B", "-c", _program()],
        json.dumps(asked).encode(),
        timeout=max(ending - time.monotonic(), 0.1),
    )
    told = _told(ran, word)
    if told is None:
        said = ran.stderr.decode(errors="replace").strip()[-300:]
        raise SandboxFailed(f"The tests were not begun ({ran.cause}). {said}".rstrip())
    reason = "the program ended the tests" if ran.cause == "ended" else ran.cause.replace("_", " ")
    found = {name: _outcome(told, place, reason) for name, place in places.items()}
    if _outcome(told, proof, reason).startswith(("passed", "not reached")):
        # Of one that was not reached the others may be told by who ended them.
        why = "a test that has to fail did not"
        return {name: why if outcome == "passed" else outcome for name, outcome in found.items()}
    return found


def _place(task: CodingTask, name: str) -> str:
    """A test's name, with its path from the working folder."""
    path, mark, test = name.partition("::")
    if task.layout.tests is not None and path.startswith(f"{task.layout.tests}/"):
        return f"{TESTS}/{path.removeprefix(f'{task.layout.tests}/')}{mark}{test}"
    return f"{FOLDER}/{posixpath.normpath(path)}{mark}{test}"


def _told(ran: Executed, word: str) -> list[tuple[str, str, str]] | None:
    """What the program told of tests; None where it did not begin."""
    start, found = f"{word} ".encode(), []
    for line in ran.stdout.splitlines():
        if line.startswith(start):
            try:
                name, outcome, why = json.loads(line.removeprefix(start))
            except ValueError:  # it was stopped in the middle of the line
                continue
            found.append((str(name), str(outcome), str(why)))
    return found[1:] if found and found[0][1] == "begun" else None


def _outcome(told: Sequence[tuple[str, str, str]], place: str, reason: str) -> str:
    """Of a test, or of all that its name stands for: passed where each passed each time."""
    own = [
        (outcome, why)
        for name, outcome, why in told
        if name == place
        or name.startswith((f"{place}[", f"{place}::"))
        or (outcome == "failed" and place.startswith(f"{name}::"))  # a file that cannot be loaded
    ]
    if not own:
        return f"not reached: {reason}"
    bad = next(((outcome, why) for outcome, why in own if outcome != "passed"), None)
    return "passed" if bad is None else f"{bad[0]}: {bad[1].strip()[-300:]}".rstrip(": ")
