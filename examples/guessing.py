"""A game of two turns: the model names a number, is told one, and names one again.

refrain grpo guessing.yaml            # in this folder
refrain grpo guessing.yaml episodes.environment.params.helpful=false   # nothing to learn
refrain grpo guessing.yaml episodes.environment.kind=agent \
    episodes.environment.path=guessing.py:ask        # the same game, as a program that asks the model
"""

from __future__ import annotations

import random

import httpx


class Guessing:
    """Two guesses at a number; the first is answered with the number, or, unhelpful, with any."""

    def __init__(self, numbers: int = 4, helpful: bool = True) -> None:
        self._numbers = numbers
        self._helpful = helpful

    def reset(self, seed: int = 0, **row: object) -> str:
        """Begin; the seed decides on the number."""
        drawn = random.Random(seed)
        self._number = drawn.randrange(self._numbers)
        self._told = self._number if self._helpful else drawn.randrange(self._numbers)
        self._guesses = 0
        self._right = False
        self.done = False
        return ""

    def step(self, text: str) -> str:
        """Answer a guess, which is the last character of the text."""
        self._guesses += 1
        if self._guesses == 1:
            return f"={self._told}:"
        self._right, self.done = text[-1:] == str(self._number), True
        return ""

    def get_reward(self) -> float:
        """1 for a right second guess; 0 for a wrong one, or where none came."""
        return float(self._right)


def ask(base_url: str, api_key: str, seed: int = 0, helpful: bool = True) -> float:
    """The same game as an agent, which asks the model for both guesses over HTTP."""
    game = Guessing(helpful=helpful)
    game.reset(seed)
    chat = [{"role": "user", "content": "number "}]
    headers = {"Authorization": f"Bearer {api_key}"}
    # No certificates are read for an address of this machine: that takes longer than the game.
    with httpx.Client(headers=headers, timeout=None, verify=False) as client:
        while not game.done:
            answer = client.post(f"{base_url}/chat/completions", json={"messages": chat})
            if answer.is_error:  # a turn was too long: there is no other
                break
            said = answer.json()["choices"][0]["message"]
            chat += [said, {"role": "user", "content": game.step(said["content"])}]
    return game.get_reward()


def rows(size: int = 64) -> list[dict[str, str]]:
    """Prompts, all alike: what differs is the seed of each row's environment."""
    return [{"question": "number "} for _ in range(size)]
