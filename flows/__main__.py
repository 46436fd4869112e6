"""The command `refrain`, also `python -m flows`: every command of this folder by its name.

`refrain grpo tiny` is `python -m flows.grpo tiny`. A module of this folder is a command if it can be
started. `refrain` alone shows the first line of its docstring, for which nothing is imported.
"""

from __future__ import annotations

import ast
import difflib
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from configs.recipe_files import about_recipes
from configs.terminal_text import print_text
from tasks.reporting.output import until_nobody_reads

USAGE = "usage: refrain COMMAND [word …]        refrain COMMAND --help says what a command takes"
BAD_COMMAND = 2  # exit code
TRAINS = "from tasks.launch.command_line import main"  # in the text of a flow that does
STARTED = '__name__ == "__main__"'  # in the text of a module that can be started


@until_nobody_reads
def main(words: Sequence[str] = ()) -> int:
    """Run the command that the first word names, with the others; returns the exit code."""
    name, *rest = list(words) or sys.argv[1:] or ["--help"]
    about = commands()
    if name in ("-h", "--help"):
        print_text(overview(about))
        return 0
    if name not in about:
        near = difflib.get_close_matches(name, about, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        print_text(f"There is no command {name}. {hint}See refrain --help.", error=True)
        return BAD_COMMAND
    if trains(name) and all("=" in word or word == "--check" for word in rest):
        print_text(
            f"Name a recipe, or a YAML file: refrain {name} RECIPE\n\n{recipes()}", error=True
        )
        return BAD_COMMAND
    sys.argv[1:] = rest
    runpy.run_module(f"flows.{name}", run_name="__main__", alter_sys=True)  # it exits itself
    return 0


def overview(commands_by_name: Mapping[str, str]) -> str:
    """What there is: flows that train, recipes for them, other commands."""
    width = max(map(len, commands_by_name))
    lines = {name: f"  {name:<{width}}  {about}" for name, about in commands_by_name.items()}
    train = [line for name, line in lines.items() if trains(name)]
    others = [line for name, line in lines.items() if not trains(name)]
    parts = ["Train:", *train, "", recipes(), "", "Other commands:", *others]
    return "\n".join([USAGE, "", *parts])


def recipes() -> str:
    """The recipes that come with Refrain, a line each."""
    about = about_recipes()
    width = max(map(len, about))
    lines = [f"  {name:<{width}}  {what}" for name, what in about.items()]
    return "\n".join(["Recipes (refrain recipe NAME > mine.yaml writes one to change):", *lines])


def trains(command: str) -> bool:
    """Whether a command of this folder is a flow that trains."""
    return TRAINS in (Path(__file__).parent / f"{command}.py").read_text(encoding="utf-8")


def commands() -> dict[str, str]:
    """The commands by name, each with the first line of its docstring."""
    about = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        text = path.read_text(encoding="utf-8")
        if STARTED in text:
            about[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return about


if __name__ == "__main__":
    sys.exit(main())
