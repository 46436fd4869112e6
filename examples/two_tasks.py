"""Two tasks that pull in different directions: digits after DIGITS, letters after LETTERS.

refrain grpo two_tasks.yaml
refrain grpo game_and_answers.yaml    # digits as a game of two turns, letters as one answer
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def questions(rows: int) -> list[dict[str, Any]]:
    """Rows of either task; how they are asked is in the settings."""
    return [{"question": f"{number} "} for number in range(rows)]


def digits(completions: list[str], **columns: object) -> list[float]:
    """Share of the characters that are digits."""
    return [share(text, str.isdigit) for text in completions]


def letters(completions: list[str], **columns: object) -> list[float]:
    """Share of the characters that are letters."""
    return [share(text, str.isalpha) for text in completions]


class Twice:
    """Asks for digits twice: a turn is worth half the share of its characters that are digits."""

    def reset(self, **row: object) -> str:
        """Begin."""
        self._turns = 0
        return ""

    def step(self, text: str) -> tuple[str, float, bool]:
        """Ask again, or end with the second turn."""
        self._turns += 1
        return "DD", share(text, str.isdigit) / 2, self._turns == 2


def share(text: str, holds: Callable[[str], bool]) -> float:
    """Share of a text's characters of which something holds; 0 of none."""
    return sum(map(holds, text)) / max(1, len(text))
