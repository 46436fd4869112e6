"""Tokens that train are those that an engine drew, as a metric."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engines.data.column_reading import drawn_tokens
from engines.data.sample_metrics import episode_metrics
from storage.batches.writing import write_batch
from storage.objects.store import Store


def test_drawn_tokens_are_those_of_the_spans(tmp_path: Path) -> None:
    """Two turns under two versions with an answer between them, none at all, and one turn."""
    spans = [[0, 0, 2, 1, 4, 5], [], [3, 0, 1]]
    masks = [[1, 1, 0, 0, 1], [], [1, 0]]
    store = Store(str(tmp_path / "store"))
    columns = {
        "weight_spans": [np.array(one, np.int64) for one in spans],
        "response_mask": [np.array(one, np.uint8) for one in masks],
    }
    made = write_batch(store, "run/drawn.safetensors", columns)
    assert drawn_tokens(store, made).tolist() == [True, True, False, False, True, True, False]
    assert drawn_tokens(store, made.take(np.array([2, 1]))).tolist() == [True, False]


def drift(drawn: list[int], mask: list[int]) -> float:
    def tokens(values: list[int]) -> NDArray[np.bool_]:
        return np.array(values, np.bool_)

    found = episode_metrics(
        turns=np.array([2]),
        tokens=np.array([len(mask)]),
        seconds=np.zeros(1),
        ended=["done"],
        drawn=tokens(drawn),
        mask=tokens(mask),
    )
    return found["episode/drift"]


@pytest.mark.parametrize(
    ("drawn", "mask", "share"),
    [
        ([1, 1, 0, 1], [1, 1, 0, 1], 0.0),
        ([1, 1, 0, 0], [1, 0, 0, 1], 2 / 3),  # one that was drawn is gone, one was not drawn
        ([0, 0], [0, 0], 0.0),
        ([], [], 0.0),
    ],
)
def test_drift_is_the_share_that_is_not_both(
    drawn: list[int], mask: list[int], share: float
) -> None:
    assert drift(drawn, mask) == pytest.approx(share)
