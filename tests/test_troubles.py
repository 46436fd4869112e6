"""The sentences of docs/troubles.md are those that the program prints."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubles.md"
# What stands for something else, or is a value: capitals, numbers, paths, an ellipsis, settings.
HOLES = re.compile(
    r"…|\b[A-Z]+\b|\b\d+\b|'[^']*'|[\w./]*\.\w[\w./]*|\b\w+ = \w+|[=:;()`\[\]|]|\. |\bturn_tokens\b|\bfailed$|failed:"
)
# Prefect's, Dask's and the job system's own words, and rows without a sentence.
OTHERS = (
    "Can't locate revision",
    "allowed-failures",
    "mine",
    "my_flow.py",
    "is stuck in phase",
    "sbatch refused",
)


@cache
def printed() -> str:
    """All texts of the program, one after the other, each with its values left out."""
    found = []
    for folder in ("configs", "engines", "storage", "tasks", "flows"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    found.append(
                        "".join(
                            p.value if isinstance(p, ast.Constant) else "…" for p in node.values
                        )
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def pieces(sentence: str) -> list[str]:
    """The parts of a sentence between what stands for something else, of two words or more."""
    return [piece.strip(" .,") for piece in HOLES.split(sentence) if piece.strip(" .,").count(" ")]


def sentences() -> list[str]:
    """What stands in backquotes in the first column of the page's tables."""
    rows = [
        line
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ") and "|---" not in line
    ]
    cells = [row.split(" | ")[0] for row in rows]
    said = [part for cell in cells for part in re.findall(r"`([^`]+)`", cell)]
    return [one for one in said if " " in one and not any(other in one for other in OTHERS)]


def test_the_page_has_sentences() -> None:
    assert len(sentences()) > 40


@pytest.mark.parametrize("sentence", sentences())
def test_a_sentence_of_the_page_is_printed(sentence: str) -> None:
    for piece in pieces(sentence):
        assert piece in printed(), piece


def test_a_sentence_that_is_not_printed_is_seen() -> None:
    (piece,) = pieces("X: there is no such thing as that.")
    assert piece not in printed()
