"""The command `refrain`, also `python -m flows`: every command of this folder by its name.

`refrain grpo tiny` is `python -m flows.grpo tiny`. A module of this folder is a command if it can be
started. `refrain --help` shows the first line of its docstring, for which nothing is imported.
"""

from __future__ import annotations

import ast
import difflib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.terminal_text import print_text
from tasks.reporting.output import until_nobody_reads

USAGE = "usage: refrain COMMAND [word …]        refrain COMMAND --help says what a command takes"
BAD_COMMAND = 2  # exit code
STARTED = '__name__ == "__main__"'  # in the text of a module that can be started


@until_nobody_reads
def main(words: Sequence[str] = ()) -> int:
    """Run the command that the first word names, with the others; returns the exit code."""
    name, *rest = list(words) or sys.argv[1:] or ["--help"]
    found = commands()
    if name in ("-h", "--help"):
        width = max(map(len, found))
        lines = [f"  {one:<{width}}  {about}" for one, about in found.items()]
        print_text("\n".join([USAGE, "", *lines]))
        return 0
    if name not in found:
        near = difflib.get_close_matches(name, found, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        print_text(f"There is no command {name}. {hint}See refrain --help.", error=True)
        return BAD_COMMAND
    sys.argv[1:] = rest
    runpy.run_module(f"flows.{name}", run_name="__main__", alter_sys=True)  # it exits itself
    return 0


def commands() -> dict[str, str]:
    """The commands by name, each with the first line of its docstring."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        text = path.read_text(encoding="utf-8")
        if STARTED in text:
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


if __name__ == "__main__":
    sys.exit(main())
