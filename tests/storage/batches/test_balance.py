"""Balanced splits: complete, deterministic, and near the best there is."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.batches.balance import balanced


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=50), st.integers(1, 9))
def test_every_row_is_in_one_part(weights: list[int], n: int) -> None:
    array = np.array(weights, np.int64)
    parts = balanced(array, n)
    assert len(parts) == n
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(weights)))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    assert [part.tolist() for part in parts] == [part.tolist() for part in balanced(array, n)]
    if len(weights) >= n:
        assert all(len(part) for part in parts)
    heaviest = max(int(array[part].sum()) for part in parts)
    # Greedy's bound: when the heaviest part got its last row, no other part was lighter.
    assert heaviest <= 1.02 * (sum(weights) / n + max(weights, default=0))


def test_contiguous_when_that_is_as_good() -> None:
    weights = np.random.default_rng(0).integers(10, 1000, 5000)
    parts = balanced(weights, 8)
    assert all((np.diff(part) == 1).all() for part in parts)
    sums = [int(weights[part].sum()) for part in parts]
    assert max(sums) <= 1.02 * np.mean(sums)


def test_one_long_row_gets_a_part_of_its_own() -> None:
    parts = balanced(np.array([9, 9, 100, 9, 9]), 2)
    assert [part.tolist() for part in parts] == [[2], [0, 1, 3, 4]]
