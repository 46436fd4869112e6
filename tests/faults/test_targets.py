"""The functions at which faults are planted are where the plans say; the slow suite relies on it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGET = re.compile(r'target="((?:engines|tasks|storage|flows)[\w.]*:[\w.]+)"')
TARGETS = sorted(
    {found for path in ROOT.glob("tests/**/*.py") for found in TARGET.findall(path.read_text())}
)


@pytest.mark.parametrize("target", TARGETS)
def test_it_is_there(target: str) -> None:
    module, _, path = target.partition(":")
    body = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text()).body
    imported = [one for one in body if isinstance(one, ast.ImportFrom)]
    known = {alias.asname or alias.name for one in imported for alias in one.names}
    for name in path.split("."):
        named = {getattr(one, "name", None): one for one in body}
        assert name in {*named, *known}, f"{module} has no {path}"
        body = getattr(named.get(name), "body", [])
