r"""The boxes of a completion, \boxed{…}: where answers are told to stand."""

from __future__ import annotations

import re
from dataclasses import dataclass

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_STYLE = re.compile(r"\\(?:display|text|script)style(?![a-z])")


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    r"""One of them: of `so \boxed{ {3} }.` from 3 to 15, with 3."""

    start: int  # of its backslash
    end: int  # after its closing brace
    content: str  # without a style or braces around all of it; never empty


def boxes_of(text: str) -> list[Box]:
    """The boxes that close and hold something, by where they begin."""
    ends = closing_braces(text)
    boxes = []
    for match in BOX.finditer(text):
        end = ends.get(match.end() - 1)
        content = "" if end is None else _unwrapped(text[match.end() : end])
        if end is not None and content:
            boxes.append(Box(start=match.start(), end=end + 1, content=content))
    return boxes


def closing_braces(text: str) -> dict[int, int]:
    r"""Where each brace closes, by where it opens; absent where it does not. \{ is none."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            ends[opened.pop()] = match.start()
    return ends


def _unwrapped(content: str) -> str:
    content = _STYLE.sub("", content).strip()
    while content.startswith("{") and closing_braces(content).get(0) == len(content) - 1:
        content = content[1:-1].strip()
    return content
