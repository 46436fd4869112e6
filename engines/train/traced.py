"""The sizes of a model of any kind, as its code makes them; without torch, which a child has."""

from __future__ import annotations

import json
from pathlib import Path

from engines.models.traced_shape import TracedShape
from engines.train.cached_child import CachedChild


def traced_shape(
    directory: Path, longest: int, products: str, adapter: bool = False
) -> TracedShape:
    """Of the model of a directory, by a child that takes about ten seconds; then by what it said.

    longest: tokens of the longest sequence that is read. products: their format, as
    train.compute_dtype has it. adapter: whether one is trained alone.
    Raises BrokeOff where the code cannot be gone through without the weights.
    """
    child = CachedChild(
        module="engines.train.tracing",
        read=lambda line: TracedShape.from_json(json.loads(line)),
        directory=directory,
        arguments=(str(longest), products, *(["adapter"] if adapter else [])),
        folder="shapes",
    )
    with child.begun() as told:
        return told()
