"""How the data engine reads columns of a stored batch: whole, as tensors or arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from storage.batches.columns import SCORE
from storage.batches.refs import BatchRef
from storage.objects.store import Store


def tokens(store: Store, samples: BatchRef, column: str) -> Tensor | None:
    """A jagged column's values [T], or None where the batch has no such column."""
    if column not in samples.names:
        return None
    return torch.from_numpy(np.array(jagged(store, samples, column)[0]))


def numbers(store: Store, samples: BatchRef, column: str) -> Tensor:
    """A column with one number a row, [N]."""
    return torch.from_numpy(np.array(dense(store, samples, column)))


def components(store: Store, samples: BatchRef) -> dict[str, Tensor]:
    """What each reward function gave, by its name [N]; NaN where it had nothing to say."""
    names = [name for name in samples.names if name.startswith(SCORE)]
    return {name.removeprefix(SCORE): numbers(store, samples, name) for name in names}


def policy_tokens(store: Store, samples: BatchRef) -> NDArray[np.int64]:
    """How many response tokens of each sample the policy wrote [N]: all of them, but in episodes."""
    if "author" not in samples.names:
        return samples.lengths(store, "response_mask")
    mask, offsets = jagged(store, samples, "response_mask")
    total = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    return np.diff(total[offsets])


def drawn_tokens(store: Store, samples: BatchRef) -> NDArray[np.bool_]:
    """Which response tokens an engine drew, by the spans of the policy versions that wrote them [T].

    Spans (0, 0, 2) and (0, 4, 5) of one sample of five tokens: 1 1 0 0 1.
    """
    spans, of_sample = jagged(store, samples, "weight_spans")
    _, begins = jagged(store, samples, "response_mask")
    begin = np.repeat(begins[:-1], np.diff(of_sample) // 3)
    edges = np.zeros(int(begins[-1]) + 1, np.int64)
    np.add.at(edges, begin + spans[1::3], 1)
    np.add.at(edges, begin + spans[2::3], -1)
    drawn: NDArray[np.bool_] = np.cumsum(edges[:-1]) > 0
    return drawn


def dense(store: Store, samples: BatchRef, column: str) -> NDArray[Any]:
    """As `numbers`, in numpy."""
    return samples.fetch_numpy(store, column)[0]


def jagged(store: Store, samples: BatchRef, column: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """A jagged column: values [T] and offsets [N + 1]."""
    values, offsets = samples.fetch_numpy(store, column)
    assert offsets is not None, column
    return values, offsets
