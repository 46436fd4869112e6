"""Rich's console for text of whatever origin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from configs.terminal_text import terminal_text


class SafeConsole(Console):
    """Prints what it is given and obeys none of it: no markup, and no control characters.

    So a table's cells and titles may hold names and text of others as they are.
    """

    def __init__(self, *, width: int | None = None, soft_wrap: bool = False) -> None:
        super().__init__(
            width=width, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False
        )

    def render_str(self, text: str, **how: Any) -> Text:
        """Text of a str, which a table's cells may be."""
        return super().render_str(terminal_text(text), **{**how, "markup": False, "emoji": False})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Each text passes here, also one within a table, before it is laid out."""
        if isinstance(renderable, Text) and terminal_text(renderable.plain) != renderable.plain:
            renderable = renderable.blank_copy(terminal_text(renderable.plain))
        return super().render(renderable, options)
