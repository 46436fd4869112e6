"""The words that tokens were drawn from: joined, cut, stored and read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from storage.batches.sampling_mask import (
    NO_TOKENS,
    SamplingMask,
    mask_columns,
    read_masks,
)
from storage.batches.writing import write_batch
from storage.objects.store import Store


def words_of(mask: SamplingMask) -> list[list[int]]:
    """The words of each token."""
    return [part.tolist() for part in np.split(mask.words, mask.counts.cumsum()[:-1])]


def mask_of(*words: list[int]) -> SamplingMask:
    return SamplingMask.of([np.array(each, np.int64) for each in words])


def test_parts_joined_are_the_whole() -> None:
    whole = mask_of([3, 9], [], [1], [4, 5, 6])
    for start in range(5):
        after = whole.after(start)
        before = SamplingMask(
            counts=whole.counts[:start], words=whole.words[: len(whole.words) - len(after.words)]
        )
        joined = before.followed_by(after)
        assert words_of(joined) == [[3, 9], [], [1], [4, 5, 6]]
    assert words_of(NO_TOKENS.extended(2).followed_by(mask_of([7]))) == [[], [], [7]]


def test_they_are_stored_beside_tokens_that_nobody_drew(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    masks = [mask_of([3, 9], [1]), NO_TOKENS, mask_of([5])]
    written = write_batch(store, "batch.safetensors", mask_columns(masks, [3, 0, 1]))
    found = read_masks(store, written.take([2, 0, 1]))
    assert [len(mask) for mask in found] == [1, 3, 0]
    assert words_of(found[1]) == [[3, 9], [1], []]
    assert mask_columns([None, None], [3, 1]) == {}


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([9, 4, 3], "1 tokens of a sample are not among the words"),
        ([1, 1, 3], "2 tokens of a sample"),
        ([3], "A sample of 1 tokens has a sampling mask of 3 tokens"),
    ],
)
def test_a_token_that_cannot_have_been_drawn_is_a_fault(tokens: list[int], said: str) -> None:
    mask = mask_of([3, 9], [], [2, 7])
    mask.check_holds(np.array([9, 4, 7]))
    mask.check_holds(np.array([3, 0, 2]))
    with pytest.raises(ValueError, match=said):
        mask.check_holds(np.array(tokens))
