"""FrozenLake of gymnasium for a policy that looks at pictures, and writes an action token a turn.

pip install gymnasium
refrain grpo seen_lake.yaml        # in this folder; 0 or 1 for an episode
refrain srpo seen_lake.yaml        # rewards for progress, which the same pictures measure
"""

from __future__ import annotations

import re
from typing import Any

HOLES, GOAL = (5, 7, 11, 12), 15  # tiles of the map 4x4
TILE = 8  # pixels of a side: a patch of the policy's is a tile
ICE, WATER, GREEN, RED = (200, 220, 240), (20, 30, 60), (40, 180, 80), (230, 40, 40)


class Lake:
    """The lake from above: ice, holes, the goal, and a red square where one stands."""

    def describe(self, observation: int, info: dict[str, Any]) -> str:
        """Nothing: the policy looks."""
        return ""

    def frame(self, observation: int, info: dict[str, Any]) -> Any:
        """A picture [32, 32, 3] of 8 bits."""
        import numpy as np

        colours = np.full((16, 3), ICE, np.uint8)
        colours[list(HOLES)] = WATER
        colours[GOAL] = GREEN
        picture = colours.reshape(4, 4, 3).repeat(TILE, 0).repeat(TILE, 1)
        row, column = (TILE * place for place in divmod(int(observation), 4))
        picture[row + 2 : row + TILE - 2, column + 2 : column + TILE - 2] = RED
        return picture

    def action(self, text: str) -> int:
        """<0> left, <1> down, <2> right, <3> up. Raises ValueError for anything else."""
        if (found := re.fullmatch(r"<([0-3])>", text.strip())) is None:
            raise ValueError("write one of <0> to <3>")
        return int(found[1])


def rows(size: int = 64) -> list[dict[str, str]]:
    """Prompts, all alike, and so is the lake."""
    return [{"question": "cross the lake"} for _ in range(size)]
