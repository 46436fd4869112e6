"""Samples that were written one by one, as one batch of a shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from engines.models.routed_experts import write_by_prompt
from storage.batches.columns import PROMPT_COLUMNS, UNFINISHED, SampleStatus
from storage.batches.format import DTYPES
from storage.batches.reading import read_columns
from storage.batches.ref_columns import ColumnRef
from storage.batches.refs import BatchRef
from storage.objects.store import Store


def gathered(
    store: Store, prompts: BatchRef, n: int, samples: Sequence[BatchRef | None], out_key: str
) -> BatchRef:
    """Write N samples under one key; columns of their prompts, and frames, stay by reference.

    Args:
        store: of the batches.
        prompts: [P], with n samples each, or as many as their column says, one prompt after another.
        n: that are asked of a prompt.
        samples: [N] of a row each, all with the same columns; None: nothing of it was sampled.
        out_key: of the batch.
    """
    there = BatchRef.concat([one for one in samples if one is not None])
    own = [name for name in there.names if name not in PROMPT_COLUMNS]
    sizes = prompts.group_sizes(store, n)
    places = np.repeat(np.arange(len(prompts)), sizes)
    numbers = prompts.own_groups(store)[places] * n + np.concatenate([*map(np.arange, sizes)])
    unbegun: dict[str, Sequence[object]] = {
        "sample_id": list(numbers),
        "status": [np.int64(SampleStatus.UNFINISHED)] * len(samples),
        "finish_reason": [UNFINISHED] * len(samples),
    }
    found = read_columns(store, there[own].columns)
    columns: dict[str, object] = {}
    for name in own:
        column, values = there.column(name), iter(found[name].rows())
        nothing = unbegun.get(name, [_nothing(column)] * len(samples))
        cells = [
            next(values) if one is not None else instead
            for one, instead in zip(samples, nothing, strict=True)
        ]
        columns[name] = np.stack(cast("Any", cells)) if column.kind == "dense" else cells
    written = write_by_prompt(store, out_key, columns, places)
    # Referred to: of the samples that there are, which may see others by now, else of their prompts.
    shared = [name for name in there.names if name in PROMPT_COLUMNS]
    every = BatchRef.concat([there[shared], prompts[shared].take(places)])
    begun = np.array([one is not None for one in samples])
    rows = np.where(begun, np.cumsum(begun) - 1, len(there) + np.arange(len(samples)))
    return every.take(rows).with_columns(written)


def _nothing(column: ColumnRef) -> object:
    """What a column says of a sample that was not begun."""
    if column.kind == "str":
        return ""
    if column.kind == "json":
        return []
    dtype = DTYPES[column.dtype][1]
    return np.zeros((0, *column.shape) if column.kind == "jagged" else column.shape, dtype)
