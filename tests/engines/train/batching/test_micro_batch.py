"""Packing rows into a micro-batch: the docstrings' example, and rows that take no room."""

import numpy as np

from engines.train.batching.packed_batch import pack
from engines.train.model.attention import Bucket


def rows(*parts: list[int]) -> list[np.ndarray]:
    return [np.array(part, dtype=np.int64) for part in parts]


def test_the_example_of_the_docstrings() -> None:
    packed = pack(rows([5, 6], [5, 6]), rows([7, 8, 9], [4]))
    assert packed.tokens.tolist() == [5, 6, 7, 8]
    assert packed.positions.tolist() == [0, 1, 2, 3]
    assert packed.predictors.tolist() == [1, 2, 3, 1]
    assert packed.labels.tolist() == [7, 8, 9, 4]
    assert packed.rows.offsets.tolist() == [0, 3, 4]
    assert (packed.squares, packed.whole) == (20, 6)
    layout = packed.layout
    assert layout.expand.tolist() == [0, 1, 2, 3, 0, 1, 0]
    assert layout.collapse.tolist() == [4, 5, 2, 3]
    assert [each.tolist() for each in layout.copies] == [[[0, 1], [4, 5]]]
    assert layout.buckets == (
        Bucket(start=0, sequences=1, length=4),
        Bucket(start=4, sequences=1, length=2),
        Bucket(start=6, sequences=1, length=1),
    )


def test_a_row_without_response_takes_no_room() -> None:
    packed = pack(rows([1, 2], [3], [1, 2]), rows([4, 5], [], [6]))
    assert packed.tokens.tolist() == [1, 2, 4]
    assert packed.labels.tolist() == [4, 5, 6]
    assert packed.rows.offsets.tolist() == [0, 2, 2, 3]


def test_no_rows_are_one_token_that_nobody_learns_from() -> None:
    packed = pack([], [])
    assert packed.tokens.tolist() == [0]
    assert packed.labels.numel() == packed.predictors.numel() == 0
    assert packed.rows.count == 0
