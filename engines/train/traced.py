"""The sizes of a model of any kind, as its code makes them; without torch, which a child has."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from configs.lora import LoraConfig
from engines.models.traced_shape import TracedShape
from engines.train.cached_child import BrokeOff, CachedChild

LEAST = 8  # tokens of a sequence that is gone through
MOST = 1024  # tokens of a sequence that is gone through; memory of longer ones follows
LIMIT = 120.0  # seconds


def traced_shape(
    directory: Path, longest: int, products: str, lora: LoraConfig | None = None
) -> TracedShape:
    """Of the model of a directory, by a child that takes about ten seconds; then by what it said.

    longest: tokens of the longest sequence that is read. products: their format, as
    train.compute_dtype has it. lora: an adapter that is trained alone.
    Raises BrokeOff where the code cannot be gone through without the weights, or not in LIMIT.
    """
    settings = () if lora is None else (lora.model_dump_json(exclude={"alpha"}),)
    answer = _asked(directory, min(max(longest, LEAST), MOST), products, *settings)
    if isinstance(answer, str):
        raise BrokeOff(answer)
    return answer


@cache
def _asked(directory: Path, longest: int, products: str, *lora: str) -> TracedShape | str:
    """Once in a process, for a plan asks many times; why not, where the child broke off."""
    child = CachedChild(
        module="engines.train.tracing",
        read=lambda line: TracedShape.from_json(json.loads(line)),
        directory=directory,
        arguments=(str(longest), products, *lora),
        folder="shapes",
        limit=LIMIT,
    )
    with child.begun() as results:
        try:
            return results()
        except BrokeOff as error:
            return str(error)
