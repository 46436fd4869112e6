"""A function as a tool: prices that nobody knows who does not ask for them.

refrain grpo tools.yaml               # in this folder
"""

from __future__ import annotations

import random

_THINGS = ("bread", "candle", "hammer", "lamp", "mirror", "pencil", "rope", "table")
_SHOWN = ("cheese", "ladder")  # in the prompt
_CALL = '<tool_call>{{"name": "price", "arguments": {{"item": "{}"}}}}</tool_call>'


def price(item: str) -> int:
    """Look up what something costs.

    Args:
        item: such as cheese.
    """
    name = item.strip().lower()
    if name not in (*_THINGS, *_SHOWN):
        raise ValueError(f"{item[:40]!r} is not sold here")
    return random.Random(name).randint(100, 999)


def rows(size: int = 2000, seed: int = 0) -> list[dict[str, object]]:
    """Questions for prices, each after two that were answered with the tool."""
    drawn = random.Random(seed)
    shown = [message for item in _SHOWN for message in _answered(item)]
    return [
        {"question": [*shown, _asked(item)], "answer": str(price(item))}
        for item in (drawn.choice(_THINGS) for _ in range(size))
    ]


def _asked(item: str) -> dict[str, str]:
    return {"role": "user", "content": f"What does the {item} cost?"}


def _answered(item: str) -> list[dict[str, str]]:
    said = [_CALL.format(item), str(price(item)), str(price(item))]
    roles = ("assistant", "user", "assistant")
    turns = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    return [_asked(item), *turns]
