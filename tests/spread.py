"""Cases of one kind, of which a few are in the fast suite and all in the slow one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def spread(names: Iterable[str], quick: int) -> list[Any]:
    """Parameters of a test: `quick` of the names, evenly apart, and the others marked slow."""
    every = list(names)
    last, gaps = len(every) - 1, max(quick - 1, 1)
    fast = {round(last * number / gaps) for number in range(quick)}
    return [
        name if place in fast else pytest.param(name, marks=pytest.mark.slow)
        for place, name in enumerate(every)
    ]
