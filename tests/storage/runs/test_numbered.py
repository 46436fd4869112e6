"""What a message says of the steps that can be named."""

import pytest

from storage.runs.run_store import numbered


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (1, 0, "There is none yet."),
        (4, 3, "There is none yet."),
        (1, 1, "Name 1, the only one."),
        (0, 3, "Name one from 0 to 3."),
    ],
)
def test_only_what_is_there_can_be_named(first: int, last: int, said: str) -> None:
    assert numbered(first, last) == said
