"""The sizes of a model of any kind, as its code makes them; without torch, which a child has."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from engines.models.traced_shape import TracedShape
from engines.train.cached_child import BrokeOff, CachedChild

LEAST = 8  # tokens of a sequence that is gone through
MOST = 1024  # tokens of a sequence that is gone through; memory of longer ones follows
LIMIT = 120.0  # seconds


def traced_shape(
    directory: Path, longest: int, products: str, adapter: bool = False
) -> TracedShape:
    """Of the model of a directory, by a child that takes about ten seconds; then by what it said.

    longest: tokens of the longest sequence that is read. products: their format, as
    train.compute_dtype has it. adapter: whether one is trained alone.
    Raises BrokeOff where the code cannot be gone through without the weights, or not in LIMIT.
    """
    found = _asked(directory, min(max(longest, LEAST), MOST), products, adapter)
    if isinstance(found, str):
        raise BrokeOff(found)
    return found


@cache
def _asked(directory: Path, longest: int, products: str, adapter: bool) -> TracedShape | str:
    """Once in a process, for a plan asks many times; why not, where the child broke off."""
    child = CachedChild(
        module="engines.train.tracing",
        read=lambda line: TracedShape.from_json(json.loads(line)),
        directory=directory,
        arguments=(str(longest), products, *(["adapter"] if adapter else [])),
        folder="shapes",
        limit=LIMIT,
    )
    with child.begun() as told:
        try:
            return told()
        except BrokeOff as error:
            return str(error)
