"""Eight tasks of a new user, as scripts of commands that stand on a page, in a fresh environment.

A line of a script is a command of the page that was named last; `# write` makes files of it, `# with`
adds words to the next command, in place of a GPU or of patience. RUN is the run that was made last. A
command that fails is a stumble, and a test allows none.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.deploy.wheel import built
from tests.examples.pages import files_of
from tests.flows.conftest import ROOT, settings_for

HERE = Path(__file__).parent
SCRIPTS = sorted(HERE.glob("*.sh"))
LIMIT = 600.0  # seconds of a task that is done at the first try
UV = ROOT / ".venv/bin/uv"
EXTRAS = "cpu,demo,environments"


@dataclass(frozen=True)
class Command:
    """A command, the page on which it stands, and words that a test adds."""

    page: str
    words: str  # as on the page, its lines joined
    added: str = ""

    @property
    def to_run(self) -> str:
        """It, with what is added before a redirection."""
        words, redirected, file = self.words.partition(" > ")
        return " ".join(one for one in (words, self.added) if one) + redirected + file


@dataclass(frozen=True)
class Script:
    """What a task takes."""

    commands: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)  # text by name


def joined(text: str) -> str:
    """Lines that go on after a backslash as one line, with single spaces."""
    return re.sub(r"[ \t]+", " ", re.sub(r"\\\n\s*", "", text))


def read(path: Path) -> Script:
    """A script; KeyError where a page has no such file."""
    script, page, added = Script(), "", ""
    for line in joined(path.read_text()).splitlines():
        what, _, rest = line.removeprefix("# ").partition(" ")
        if not line.startswith("# "):
            script.commands.append(Command(page, line, added))
            added = ""
        elif what == "page":
            page = rest
        elif what == "write":
            files = files_of(Path(page).name)
            script.files.update({name: files[name] for name in rest.split()})
        else:
            assert what == "with", line
            added = shlex.join(shlex.split(rest))
    return script


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_each_command_stands_on_its_page(path: Path) -> None:
    for command in read(path).commands:
        text = joined((ROOT / command.page).read_text())
        on_page = rf"(?m)(?:^|`){re.escape(command.words)}(?=\s*(?:`|#|$))"
        assert re.search(on_page, text), f"{command.page} has no {command.words!r}"


def test_there_are_eight_tasks() -> None:
    assert len(SCRIPTS) == 8


class Newcomer:
    """Somebody with a fresh environment and an empty folder."""

    def __init__(self, programs: Path, folder: Path, prefect_api: str) -> None:
        self.folder, self.run = folder, ""
        self.stumbles: list[str] = []
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        path = f"{programs}:{os.environ['PATH']}"
        self._variables = {
            **kept,
            **settings_for(prefect_api),
            "PATH": path,
            "OMP_NUM_THREADS": "1",
        }

    def types(self, command: str) -> str:
        """What a command prints; one that fails is a stumble."""
        command = re.sub(r"\bRUN\b", self.run or "RUN", command)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self._variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        if done.returncode or "Traceback" in done.stdout:
            self.stumbles.append(f"$ {command}\n{done.stdout}")
        if found := re.search(r"^Run (\S+): ", done.stdout, re.MULTILINE):
            self.run = found[1]
        return done.stdout


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with nothing but the wheel and what it asks for."""
    folder = tmp_path_factory.mktemp("fresh")
    variables = {
        **os.environ,
        "UV_FIND_LINKS": os.environ.get("UV_FIND_LINKS", os.environ.get("PIP_FIND_LINKS", "")),
        "UV_OVERRIDE": str(ROOT / "infra/cpu-overrides.txt"),
        "VIRTUAL_ENV": str(folder / "venv"),
    }
    began = time.monotonic()
    wheel = built(folder)
    for words in (
        ["venv", "--python", str(ROOT / ".venv/bin/python"), str(folder / "venv")],
        ["pip", "install", f"refrain-rl[{EXTRAS}] @ file://{wheel}"],
    ):
        done = subprocess.run([UV, *words], cwd=ROOT, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    print(json.dumps({"task": "install", "seconds": round(time.monotonic() - began)}))
    return folder / "venv/bin"


@pytest.fixture
def newcomer(programs: Path, tmp_path: Path, prefect_api: str) -> Newcomer:
    """In a folder without a file."""
    folder = tmp_path / "empty"
    folder.mkdir()
    return Newcomer(programs, folder, prefect_api)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_task_is_done_without_a_stumble(path: Path, newcomer: Newcomer) -> None:
    script, began = read(path), time.monotonic()
    for name, text in script.files.items():
        (newcomer.folder / name).write_text(text)
    for command in script.commands:
        newcomer.types(command.to_run)
    seconds = time.monotonic() - began
    print(json.dumps({"task": path.stem, "seconds": round(seconds), "run": newcomer.run}))
    assert newcomer.stumbles == [], "\n".join(newcomer.stumbles)
    assert seconds < LIMIT


@pytest.mark.cluster
@pytest.mark.slow
def test_a_wrong_setting_is_mended_by_its_sentence_alone(newcomer: Newcomer) -> None:
    script = read(HERE / "own_reward.sh")
    for name, text in script.files.items():
        (newcomer.folder / name).write_text(text)
    command = script.commands[0].to_run.replace("data.source.path=", "data.source.pth=")
    said = newcomer.types(command)
    assert len(newcomer.stumbles) == 1
    assert "Traceback" not in said
    wrong, right = re.findall(r"^([\w.]+): .* Did you mean ([\w.]+)\?$", said, re.MULTILINE)[0]
    newcomer.types(command.replace(f"{wrong}=", f"{right}="))
    assert len(newcomer.stumbles) == 1, newcomer.stumbles[-1]
    assert newcomer.run
