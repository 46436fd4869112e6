"""A small world that comes with Refrain, to try flows out that look at what an episode saw."""

from __future__ import annotations

from typing import Any


class Corridor:
    """A walk along some tiles, to the last one: 1 there, and nothing before it.

    Every other character is a step to the right, and those between are steps to the left, so that a
    random model walks at random. A frame is a bar of light that is as long as the way is done.
    """

    def __init__(self, tiles: int = 4) -> None:
        self._last = tiles - 1
        self._place = 0

    def reset(self) -> str:
        """What the model reads first."""
        self._place = 0
        return "0:"

    def step(self, text: str) -> tuple[str, None, bool]:
        """One step; its last character says where to."""
        right = bool(text) and ord(text[-1]) % 2 == 0
        self._place = max(0, self._place + (1 if right else -1))
        return f"{self._place}:", None, self._place == self._last

    def get_reward(self) -> float:
        """1 where the walk ended on the last tile, whatever ended it."""
        return float(self._place == self._last)

    def frame(self) -> Any:
        """An image, [4, tiles, 3] of 8 bits."""
        import numpy as np

        image = np.zeros((4, self._last + 1, 3), np.uint8)
        image[:, : self._place + 1] = 255
        return image


def rows(size: int = 64) -> list[dict[str, str]]:
    """Prompts, all alike."""
    return [{"question": "walk "} for _ in range(size)]
