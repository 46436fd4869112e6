"""Data set and reward of benchmarks.large_step, in a file that reward processes load quickly."""

from __future__ import annotations

from typing import Any


def rows(count: int) -> list[dict[str, Any]]:
    """The data set: questions of a few dozen characters."""
    return [{"question": f"What is {i} plus {i % 97}?", "answer": str(i)} for i in range(count)]


def by_first_token(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """A cheap reward."""
    return [float(ids[0] % 5) / 4 if ids else 0.0 for ids in completion_ids]
