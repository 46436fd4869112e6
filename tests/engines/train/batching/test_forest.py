"""Rows that are forests of requests: each token computed once, along its own path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.train.batching.packed_batch import pack
from storage.batches.forest import Forest

EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)


def test_the_example_is_packed_once() -> None:
    forest = Forest(prompt=2, lengths=np.array([3, 1, 2]), parents=np.array([2, 4, 0]))
    packed = pack([np.array([5, 6])], [np.array([7, 8, 9, 4, 3, 2])], forests=[forest])
    tokens = packed.tokens.tolist()
    assert sorted(tokens) == [3, 5, 6, 7, 8]
    assert packed.labels.tolist() == [7, 8, 9, 4, 3, 2]
    assert [tokens[i] for i in packed.predictors.tolist()] == [6, 7, 8, 8, tokens[0], 3]
    assert dict(zip(tokens, packed.positions.tolist())) == {5: 0, 6: 1, 7: 2, 8: 3, 3: 0}
    assert packed.rows.offsets.tolist() == [0, 6]
    assert (packed.whole, packed.squares) == (4 + 4 + 1, 16 + 16 + 1)
