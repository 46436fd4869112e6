"""Names are sorted, more of them each turn: the environment of the recipe `alphabet-sort`.

The task of verifiers' alphabet-sort, with the same rules of scoring, without that library.
"""

from __future__ import annotations

import difflib
import json
import random
import re
from itertools import pairwise

from engines.environments.contract import library

_FIRST_TAG, _LATER_TAG = "alphabetical_sorted", "combined_alphabetical_sorted"
_NEW = " // new name!"


class AlphabetSort:
    """The model sorts some names, and then all names so far with the new ones marked, turn by turn.

    Args:
        turns: of an episode.
        names_per_turn: how many are added in a turn, at most.
        power: of the mean similarity, which is the reward.
    """

    def __init__(self, turns: int = 3, names_per_turn: int = 4, power: int = 8) -> None:
        self._turns, self._most, self._power = turns, names_per_turn, power

    def reset(self, names: str, seed: int) -> str:
        """Begin. names: a JSON list, each as AdaLovelace; seed: decides which of them are sorted."""
        drawn = random.Random(seed)
        pool = list(dict.fromkeys(json.loads(names)))
        if len(pool) < self._turns:
            raise ValueError(f"{len(pool)} names are too few for {self._turns} turns")
        count = drawn.randint(self._turns, self._turns * self._most)
        pool = drawn.sample(pool, min(count, len(pool)))
        self._parts = [pool[i :: self._turns] for i in range(self._turns)]
        self._by_last = drawn.random() < 0.5
        self._scores: list[float] = []
        self.done = False
        return self._task()

    def step(self, text: str) -> str:
        """Score an answer and give the next names."""
        self._scores.append(self._score(text))
        self.done = len(self._scores) == self._turns
        return "" if self.done else self._task()

    def get_reward(self) -> float:
        """Mean similarity of all turns' lists to the right ones, to a power; a missing one is 0."""
        return float((sum(self._scores) / self._turns) ** self._power)

    def _task(self) -> str:
        turn = len(self._scores)
        label = "LAST" if self._by_last else "FIRST"
        names = ", ".join(self._parts[turn])
        if not turn:
            return (
                f"Sort these names by {label} name, in alphabetical order: {names}\n\nUse exactly "
                f"this format:\n<{_FIRST_TAG}>\nName1\nName2\n</{_FIRST_TAG}>"
            )
        form = f"<{_LATER_TAG}>\nName1\nName2{_NEW}\n</{_LATER_TAG}>"
        return (
            f"These come to the list: {names}\n\nSort ALL names so far by {label} name, and put "
            f"`{_NEW.strip()}` after each that was not in the list before. Use exactly this format:\n"
            f"{form}"
        )

    def _expected(self) -> str:
        turn = len(self._scores)
        new = set(self._parts[turn]) if turn else set()
        so_far = [name for part in self._parts[: turn + 1] for name in part]
        names = sorted(so_far, key=self._key)
        return "\n".join(f"{name}{_NEW}" if name in new else name for name in names).lower()

    def _key(self, name: str) -> str:
        """The part that is sorted by: the last name begins with the second capital."""
        cut = next((i for i in range(1, len(name)) if name[i].isupper()), len(name))
        return name[cut:] if self._by_last else name[:cut]

    def _score(self, text: str) -> float:
        """Similarity to the right list, 0 to 1. Of several each has to be better than the last."""
        tag = _LATER_TAG if self._scores else _FIRST_TAG
        found = []
        for content in re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL):
            lines = [line.strip().lower() for line in content.splitlines() if line.strip()]
            found.append(difflib.SequenceMatcher(None, "\n".join(lines), self._expected()).ratio())
        if not found or any(later <= one for one, later in pairwise(found)):
            return 0.0
        return found[-1]


def rows(source: str = "kalomaze/alphabetic-arxiv-authors-it1") -> list[dict[str, str]]:
    """Rows with names, as a JSON list of texts such as AdaLovelace.

    Args:
        source: dataset of the hub, or a .jsonl file, with a list `names` in each row.
    """
    if source.endswith(".jsonl"):
        with open(source, encoding="utf-8") as file:
            entries = [json.loads(line) for line in file]
    else:
        entries = library("datasets").load_dataset(source, split="train")
    return [
        {"question": "", "names": json.dumps([name.replace(" ", "") for name in entry["names"]])}
        for entry in entries
    ]
