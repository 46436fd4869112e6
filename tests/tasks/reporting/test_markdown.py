"""Names and text of others stay text in the Markdown of a dashboard."""

from __future__ import annotations

import pytest
from markdown_it import MarkdownIt

from tasks.markdown import cell, code, escaped

HOSTILE = [
    "[docs](javascript:alert(1))",
    "![x](https://evil.example/pixel.png)",
    "<img src=x onerror=alert(1)>",
    "<https://evil.example>",
    "a\n\n# A heading\n\n| a | b |\n|---|---|",
    "`code` and ``more`` ```",
    "x` | <b>bold</b> ` y",
    "a | b",
    "**bold** ~~gone~~ __x__",
    "\\[x](y) \\`z\\`",
    "1\n- item\n+ item",
    "\x1b[2J\u202e",
    "`",
]
MARKDOWN = MarkdownIt("gfm-like", {"linkify": False})
OURS = {"paragraph", "inline", "text", "code_inline", "text_special"}


def kinds(markdown: str) -> set[str]:
    tokens = MARKDOWN.parse(markdown)
    inner = [child for token in tokens for child in token.children or ()]
    return {one.type.removesuffix("_open").removesuffix("_close") for one in [*tokens, *inner]}


def text_of(markdown: str) -> str:
    tokens = MARKDOWN.parse(markdown)
    return "".join(child.content for token in tokens for child in token.children or ())


@pytest.mark.parametrize("said", HOSTILE)
def test_it_is_text_and_nothing_else(said: str) -> None:
    shown = " ".join(said.split("\n")).replace("\x1b", r"\x1b").replace("\u202e", r"\u202e")
    for written in (escaped(said), code(said)):
        markdown = f"Of **{written}**." if written == escaped(said) else f"Of {written}."
        assert kinds(markdown) <= OURS | {"strong"}, markdown
        assert text_of(markdown) == f"Of {shown}."


@pytest.mark.parametrize("said", HOSTILE)
def test_a_cell_stays_one(said: str) -> None:
    for written in (escaped(said), cell(said)):
        markdown = f"| a | b |\n|---|---|\n| {written} | 2 |"
        tokens = MARKDOWN.parse(markdown)
        assert sum(one.type == "td_open" for one in tokens) == 2
        assert not kinds(markdown) & {"link", "image", "html_inline", "html_block", "heading"}
