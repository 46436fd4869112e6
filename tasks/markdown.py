"""Names and text of others in the Markdown of a dashboard: settings, columns, errors, model text."""

from __future__ import annotations

import html
import re

from configs.terminal_text import terminal_text


def escaped(text: object) -> str:
    """Text that may come from a model or a user, made harmless in Markdown and HTML, on one line."""
    line = terminal_text(" ".join(str(text).split("\n")))
    return re.sub(r"([\\`*_{}\[\]()#+!|~-])", r"\\\1", html.escape(line))


def code(text: object) -> str:
    """Text as a code span that no backtick in it ends, nor a bar as the cell of a table.

    Source: https://github.github.com/gfm/#code-spans
    """
    line = terminal_text(" ".join(str(text).split("\n")))
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence, room = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{room}{line}{room}{fence}"


def cell(text: object) -> str:
    """`code` for a cell of a table."""
    return code(text).replace("|", r"\|")
