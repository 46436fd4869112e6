"""Row indices against plain lists."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.batches.rows import RowIndex

numbers = st.lists(st.integers(0, 10**6), max_size=60)
runs = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 9)), max_size=40).map(
    lambda pairs: [n for start, count in pairs for n in range(start, start + count)]
)


@settings(deadline=None)
@given(numbers | runs)
def test_json_round_trip(rows: list[int]) -> None:
    index = RowIndex(rows)
    again = RowIndex.from_json(json.loads(json.dumps(index.to_json())))
    assert again == index
    assert again.array().tolist() == rows
    assert hash(again) == hash(index)


@settings(deadline=None)
@given(numbers | runs, st.data())
def test_operations(rows: list[int], data: st.DataObject) -> None:
    index = RowIndex(rows)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(rows))] * 2)))
    assert index.slice(start, stop).array().tolist() == rows[start:stop]
    picked = data.draw(st.lists(st.integers(0, max(len(rows) - 1, 0)), max_size=20 if rows else 0))
    taken = index.take(np.array(picked, np.int64))
    assert taken.array().tolist() == [rows[number] for number in picked]
    assert RowIndex.concat([index, taken]).array().tolist() == rows + taken.array().tolist()


def test_neighbours_become_a_span() -> None:
    assert RowIndex([3, 4, 5]).to_json() == [3, 6]
    assert RowIndex([]).to_json() == [0, 0]
    assert RowIndex([1, 2, 7]).to_json() == [1, 3, 7, 8]


@pytest.mark.parametrize("value", [[1], [], "9:abc", "nonsense", None, {"a": 1}, ["a", "b"]])
def test_malformed(value: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        RowIndex.from_json(value)


def test_rows_with_a_gap_are_not_equal_to_a_span_that_begins_alike():
    gap, span = RowIndex([*range(9), 11]), RowIndex(range(10))
    assert hash(gap) == hash(span)
    assert gap != span
    assert span != gap
    assert {gap: 1, span: 2}[RowIndex([*range(9), 11])] == 1
