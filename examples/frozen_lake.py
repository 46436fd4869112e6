"""FrozenLake of gymnasium as text: the codec between its numbers and what the model reads and writes.

pip install gymnasium
refrain grpo frozen_lake.yaml        # in this folder
refrain srpo frozen_lake.yaml        # docs/algorithms.md says how far that came
"""

from __future__ import annotations

from typing import Any

HOLES = (5, 7, 11, 12)  # tiles of the map 4x4


class Ice:
    """The number of the tile; each letter is a direction, so that a random model walks at random."""

    def describe(self, observation: int, info: dict[str, Any]) -> str:
        """What the model reads: the tile, 0 to 15, and a colon."""
        return f"{observation}:"

    def frame(self, observation: int, info: dict[str, Any]) -> Any:
        """What is to see: the lake at night, [4, 4] of 8 bits, with a lamp where one stands.

        Its light reaches the tiles around, so that places near each other look alike. In a hole it
        goes out: a lamp that went on burning there drew the policy into the holes near the goal.
        """
        import numpy as np

        rows, columns = np.indices((4, 4))
        row, column = divmod(int(observation), 4)
        far = (rows - row) ** 2 + (columns - column) ** 2
        light = np.exp(-far / 8) * (observation not in HOLES)
        return np.round(255 * light).astype(np.uint8)

    def action(self, text: str) -> int:
        """0 left, 1 down, 2 right, 3 up. Raises ValueError for no text."""
        if not text:
            raise ValueError("write a character")
        return ord(text[-1]) % 4


def rows(size: int = 64) -> list[dict[str, str]]:
    """Prompts, all alike, and so is the lake."""
    return [{"question": "lake "} for _ in range(size)]
