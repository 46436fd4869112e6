"""Which samples are shown, and how their texts are made harmless."""

from __future__ import annotations

import pytest

from storage.audit.transcripts import few, printable


@pytest.mark.parametrize(
    ("by_reward", "failed", "count", "rows"),
    [
        ([5, 3, 9, 1, 7], [], 3, [5, 9, 7]),
        ([5, 3, 9, 1, 7], [2, 4], 3, [5, 7, 2]),
        ([5, 3], [], 4, [5, 3]),
        ([5, 3], [8], 1, [5]),
        ([], [8, 2], 1, [8]),
        ([], [8, 2], 3, [8]),
        ([], [], 3, []),
    ],
)
def test_the_best_the_worst_and_one_that_failed(
    by_reward: list[int], failed: list[int], count: int, rows: list[int]
) -> None:
    assert few(by_reward, failed, count) == rows


def test_a_terminal_obeys_nothing_that_a_model_wrote() -> None:
    assert printable("a\tb\n\x1b[2Jc\r\x9b5n\x7f", 0) == "a\tb\n\\x1b[2Jc\\x0d\\x9b5n\\x7f"
    assert printable("x" * 30, 10) == f"{'x' * 5}\n[… 20 characters …]\n{'x' * 5}"
    assert printable("x" * 10, 10) == "x" * 10
