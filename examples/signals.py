"""A game of two players, both the model: one sees a number and sends a sign, the other guesses it.

refrain grpo signals.yaml            # in this folder
refrain grpo signals.yaml episodes.environment.params.heard=false   # nothing to learn
refrain grpo signals.yaml episodes.opponent.version=start   # with its own beginning, frozen
"""

from __future__ import annotations

import random


class Signals:
    """Player 0 is told a number and writes a sign; player 1 is told the sign and names the number.

    Both earn 1 for the right number, and 0 where it is wrong or does not come. What a sign means is
    for them to find out. Where it is not `heard`, player 1 is told a random one.
    """

    def __init__(self, numbers: int = 4, heard: bool = True) -> None:
        self._numbers = numbers
        self._heard = heard

    def reset(self, seed: int = 0, **row: object) -> list[str]:
        """Begin; the seed decides on the number. Returns what each player is told first."""
        self._random = random.Random(seed)
        self._number = self._random.randrange(self._numbers)
        self._right = False
        return [f"send {self._number}:", "guess"]

    def step(self, text: str, player: int) -> tuple[int, str] | tuple[None, None, None, bool]:
        """Answer a turn, whose last character counts: who is next, and what that one is told.

        At the end nobody is next, and there are no rewards besides those of `get_reward`.
        """
        if player == 0:
            sign = text[-1:] if self._heard else str(self._random.randrange(self._numbers))
            return 1, f"={sign}:"
        self._right = text[-1:] == str(self._number)
        return None, None, None, True

    def get_reward(self) -> list[float]:
        """Of each player, at the end, whatever ended it."""
        return [float(self._right)] * 2


def rows(size: int = 64) -> list[dict[str, str]]:
    """Prompts, all alike: what differs is the seed of each row's environment."""
    return [{"question": "signal"} for _ in range(size)]
