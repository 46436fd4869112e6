"""FrozenLake of gymnasium as text: the codec between its numbers and what the model reads and writes.

pip install gymnasium
python -m flows.grpo frozen_lake.yaml        # in this folder
"""

from __future__ import annotations

from typing import Any


class Ice:
    """The number of the tile; each letter is a direction, so that a random model walks at random."""

    def describe(self, observation: int, info: dict[str, Any]) -> str:
        """What the model reads: the tile, 0 to 15, and a colon."""
        return f"{observation}:"

    def action(self, text: str) -> int:
        """0 left, 1 down, 2 right, 3 up. Raises ValueError for no text."""
        if not text:
            raise ValueError("write a character")
        return ord(text[-1]) % 4


def rows(size: int = 64) -> list[dict[str, str]]:
    """Prompts, all alike, and so is the lake."""
    return [{"question": "lake "} for _ in range(size)]
