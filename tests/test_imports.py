"""Every import of a module of ours names one that is there, and what is in it.

mypy does not see it: a module that is not found is taken for a library's (ignore_missing_imports).
"""

from __future__ import annotations

import ast
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("flows", "tasks", "engines", "storage", "configs", "infra", "benchmarks", "tests")


def names_in(path: Path) -> set[str]:
    """What a module has at its top, whatever it is made by."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return names


def missing(path: Path, text: str, names: dict[str, set[str]]) -> list[str]:
    """Imports of a file that lead nowhere, by name."""
    module = ".".join(path.with_suffix("").parts)
    lost = []
    for node in ast.walk(ast.parse(text)):
        imported: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            imported = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.rpartition(".")[0]
            source = resolve_name("." * node.level + (node.module or ""), package)
            imported = [(source, alias.name) for alias in node.names]
        for source, name in imported:
            if source.partition(".")[0] not in PACKAGES or f"{source}.{name}" in names:
                continue
            if source not in names or (name and name not in names[source]):
                lost.append(f"{path}: {source} {name}".rstrip())
    return lost


def modules() -> dict[Path, str]:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {path.relative_to(ROOT): path.read_text() for path in paths}


def module_names() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in modules():
        parts = path.with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts)] = names_in(ROOT / path)
        for depth in range(1, len(parts)):  # folders are packages, with __init__.py or without
            found.setdefault(".".join(parts[:depth]), set())
    return found


def test_every_import_of_ours_leads_somewhere() -> None:
    names = module_names()
    assert len(names) > 500
    assert [line for path, text in modules().items() for line in missing(path, text, names)] == []


def test_an_import_of_nothing_is_seen() -> None:
    names = {"tasks": set(), "tasks.run": set(), "tasks.run.roles": {"ROLES"}}
    path = Path("tasks/one.py")
    assert missing(path, "from tasks.run.roles import ROLES\nimport tasks.run\n", names) == []
    assert missing(path, "from .run import roles\nimport torch\n", names) == []
    assert missing(path, "from tasks.run.roles import GONE\n", names) == [
        "tasks/one.py: tasks.run.roles GONE"
    ]
    assert missing(path, "import tasks.run.lost\n", names) == ["tasks/one.py: tasks.run.lost"]
