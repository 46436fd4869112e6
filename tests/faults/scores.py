"""Reward functions of a user who makes mistakes."""

from __future__ import annotations

import ctypes
import time


def raises(prompts: list, completions: list[str], **columns: object) -> list[float]:
    """Stumbles over one kind of completion."""
    return [look_closely(text) for text in completions]


def look_closely(text: str) -> float:
    if text[:1] and ord(text[0]) % 16 == 0:
        raise KeyError("the_line_that_failed")
    return float(len(set(text)))


def hangs(prompts: list, completions: list[str], **columns: object) -> list[float]:
    """Never comes back from one kind of completion."""
    for text in completions:
        if text[:1] and ord(text[0]) % 16 == 0:
            where_it_hangs()
    return [float(len(set(text))) for text in completions]


def where_it_hangs() -> None:
    time.sleep(3600)


def crashes(prompts: list, completions: list[str], **columns: object) -> list[float]:
    """Takes its process with it."""
    for text in completions:
        if text[:1] and ord(text[0]) % 16 == 0:
            where_it_crashes()
    return [float(len(set(text))) for text in completions]


def where_it_crashes() -> None:
    ctypes.string_at(0)
