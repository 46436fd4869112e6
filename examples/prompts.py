"""A prompt source of your own: rows that a function yields.

    refrain grpo own.yaml      # where data.source.path is prompts.py:sums

The flow and the workers of the data engine each call the function once, so it must give the same
rows every time. Each row is a dict whose values have a JSON form.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


def sums(size: int = 64, seed: int = 0, unanswered: int = 8) -> Iterator[dict[str, Any]]:
    """Sums of two digits; every `unanswered`-th row has no answer. From data.source.params."""
    chance = random.Random(seed)
    for number in range(size):
        a, b = chance.randint(1, 9), chance.randint(1, 9)
        known = (number + 1) % unanswered != 0
        yield {"question": f"{a} + {b} = ", "answer": a + b if known else None, "level": a * b}
