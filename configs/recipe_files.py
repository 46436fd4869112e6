"""The recipes that come with Refrain, as files; reading their settings is in recipe.py.

Imports nothing that takes time: the command without words shows them.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

FOLDER = Path(__file__).parent / "recipes"
STARTED_BY = re.compile(r"\brefrain (\w+) ")  # in what a recipe's file says first


def recipe_names() -> list[str]:
    """Names of the recipes that come with Refrain."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def about_recipes() -> dict[str, str]:
    """The recipes that come with Refrain by name, each with the first sentence of its file."""
    recipes = {}
    for name in recipe_names():
        text = " ".join(remarks(FOLDER / f"{name}.yaml"))
        recipes[name] = text.partition(". ")[0].partition(": start")[0].rstrip(".")
    return recipes


def remarks(path: Path) -> list[str]:
    """What a recipe's file says before its first setting, without the marks of comments."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return [line.removeprefix("#").strip() for line in lines]


def flow_of(path: Path) -> str | None:
    """The flow by which a recipe says that it is started; None where it says none."""
    match = STARTED_BY.search(" ".join(remarks(path)))
    return match[1] if match else None
