"""What stands in blocks of a page: files with their names, pieces of a language, commands."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:refrain|python -m) (?:.*\\\n)*.*", re.MULTILINE)


def files_of(page: str) -> dict[str, str]:
    """The files whose names stand above their blocks."""
    return dict(FILE.findall((DOCS / page).read_text()))


def blocks_of(page: str, language: str = "") -> list[str]:
    """The blocks of a language; without one: those that name none."""
    return [text for name, text in BLOCK.findall((DOCS / page).read_text()) if name == language]


def commands_of(page: str, language: str = "") -> list[str]:
    """Each of our commands in such blocks, with the lines that go on with it, in order."""
    return [one for block in blocks_of(page, language) for one in COMMAND.findall(block)]
