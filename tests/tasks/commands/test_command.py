"""The frame of the commands that look at a stored run."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

import flows
from tasks.commands.command import Command, answering

FLOWS = sorted(path.stem for path in Path(flows.__file__).parent.glob("[!_]*.py"))
MAINS = {name: getattr(importlib.import_module(f"flows.{name}"), "main", None) for name in FLOWS}
COMMANDS = {name: main for name, main in MAINS.items() if isinstance(main, Command)}


def test_the_commands_are_there() -> None:
    assert {"audit", "inspect", "replay", "lineage", "samples", "compare"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_path_names_what_answers_it(name: str) -> None:
    """Nothing else sees a path that is wrong: it is followed once the command's words are read."""
    signature = inspect.signature(answering(COMMANDS[name].answer))
    assert list(signature.parameters) == ["request"]
    assert signature.return_annotation == "Answer"


@pytest.mark.parametrize("name", COMMANDS)
def test_it_says_what_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr("sys.argv", ["refrain", "--help"])
        COMMANDS[name]()
    assert end.value.code == 0
    assert f"usage: refrain {name}" in capsys.readouterr().out
