"""Which settings may change when a run goes on."""

from __future__ import annotations

import pytest

from tasks.run.resuming import differing, may_change


@pytest.mark.parametrize(
    ("key", "may"),
    [
        ("rewards.functions.0.deadline", True),
        ("rewards.functions.12.url", True),
        ("rewards.functions.0.model", False),
        ("rewards.functions.0.params.deadline", False),  # of a user's function
        ("rewards.functions", False),
        ("cluster.pools.cpu.workers", True),
        ("storey", False),
        ("teachers.tutor.service", True),
        ("teachers.tutor.digest", False),
        ("teachers.tutor.model.seed", False),
    ],
)
def test_where_and_how_others_are_asked_may_change(key: str, may: bool) -> None:
    assert may_change(key) is may


def test_entries_of_lists_of_one_length_are_compared_one_by_one() -> None:
    old = {"functions": [{"a": 1, "b": 2}, 3]}
    assert differing(old, {"functions": [{"a": 1, "b": 4}, 3]}) == ["functions.0.b"]
    assert differing(old, {"functions": [{"a": 1, "b": 2}]}) == ["functions"]
