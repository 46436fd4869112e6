"""Files and functions that the documents name, and links between them, exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
ROOMS = "configs|storage|engines|tasks|flows|tests|infra|examples|benchmarks|docs"
# A path below one of our folders, which nothing precedes: `my/configs/x.py` is not ours.
NAMED = re.compile(rf"(?<![\w/.-])((?:{ROOMS})/[\w./-]*\w\.(?:py|yaml|md|json))(?::(\w[\w.]*))?")
FOLDERS = re.compile(rf"`((?:{ROOMS})/(?:[\w-]+/)*)`")
LINKS = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@cache
def names_in(file: Path) -> frozenset[str]:
    """Functions, classes, methods as Class.method, and constants of a module."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (ast.FunctionDef, ast.AsyncFunctionDef)
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, inner)}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(found)


def missing_in(text: str, folder: Path = ROOT) -> list[str]:
    """What a page names and the repository does not have; `folder`: where its links begin."""
    missing = []
    for path, name in NAMED.findall(text):
        file = ROOT / path
        if not file.is_file():
            missing.append(path)
        elif name and file.suffix == ".py" and name not in names_in(file):
            missing.append(f"{path}:{name}")
    missing += [path for path in FOLDERS.findall(text) if not (ROOT / path).is_dir()]
    return missing + [link for link in LINKS.findall(text) if not (folder / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    assert missing_in(page.read_text(), page.parent) == []


def test_a_name_that_is_gone_is_found() -> None:
    text = (
        "`tasks/draw.py:draw`, `storage/prompts/source.py:PromptSource.rows`, `engines/workers/` "
        "and [a page](docs/tour.md#top), but `tasks/drawn.py`, `tasks/draw.py:drawn`, "
        "`engines/cpu/` and [another](docs/tours.md)."
    )
    gone = {"tasks/drawn.py", "tasks/draw.py:drawn", "engines/cpu/", "docs/tours.md"}
    assert set(missing_in(text)) == gone


def test_the_tour_goes_through_every_room() -> None:
    text = (ROOT / "docs/tour.md").read_text()
    rooms = [path.parent for path in (ROOT / "engines").glob("*/__init__.py")]
    on_the_way = {room.name for room in rooms} - {"clusters", "processes"}  # they start workers
    assert {name for name in on_the_way if f"engines/{name}/" in text} == on_the_way
