"""The words that tokens were drawn from: joined, cut, stored and read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from storage.batches.sampling_mask import (
    COUNTS,
    NO_TOKENS,
    WORDS,
    SamplingMask,
    Words,
    mask_columns,
    read_masks,
)
from storage.batches.writing import write_batch
from storage.objects.store import Store


def words_of(mask: SamplingMask) -> list[list[int]]:
    """The words of each token, of which there are few; -1 - w for all but w."""
    sets = [[], *(words.coded.tolist() for words in mask.sets)]
    return [sets[number] for number in mask.numbers]


def mask_of(*words: list[int]) -> SamplingMask:
    return SamplingMask.of(
        [Words(ids=np.array(each, np.int32)) if each else None for each in words]
    )


def test_parts_joined_are_the_whole() -> None:
    whole = mask_of([3, 9], [], [1], [4, 5, 6])
    for start in range(5):
        after = whole.after(start)
        joined = whole.between(0, start).followed_by(after)
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


def test_few_and_nearly_all_words_are_stored_once(tmp_path: Path) -> None:
    """The shorter list is stored, and a token may have the words of an earlier one."""
    left = np.zeros((4, 9), bool)
    left[0, [3, 5]] = True
    left[1, 1:] = True
    left[2] = True
    left[3, [3, 5]] = True
    mask = SamplingMask.of([Words.of(row) for row in left])
    counts, words = mask.followed_by(mask.between(1, 2)).columns()
    assert counts.tolist() == [2, 1, 0, -1, -2]
    assert words.tolist() == [3, 5, -1]
    store = Store(f"file://{tmp_path}")
    written = write_batch(store, "batch.safetensors", mask_columns([mask, mask_of([2])], [4, 2]))
    found, _ = read_masks(store, written)
    for token, number in enumerate(found.numbers.tolist()):
        every = np.arange(9)
        kept = found.sets[number - 1].have(every) if number else np.ones(9, bool)
        assert kept.tolist() == left[token].tolist()
    found.check_holds(np.array([5, 8, 0, 3]))
    with pytest.raises(ValueError, match="2 tokens of a sample are not among"):
        found.check_holds(np.array([5, 0, 0, 4]))
    again, same = found.columns()
    assert again.tolist() == counts[:4].tolist() and same.tolist() == words.tolist()


def test_what_an_older_refrain_stored_is_read(tmp_path: Path) -> None:
    """It had the words of each token, however often they were the same."""
    columns: dict[str, object] = {
        COUNTS: [np.array([2, 0, 2], np.int32)],
        WORDS: [np.array([3, 9, 3, 9], np.int32)],
    }
    store = Store(f"file://{tmp_path}")
    (found,) = read_masks(store, write_batch(store, "batch.safetensors", columns))
    assert words_of(found) == [[3, 9], [], [3, 9]]


@pytest.mark.parametrize(
    ("counts", "words"), [([2], [1]), ([-1], []), ([0, -1], []), ([1, -3, 1], [1, 2])]
)
def test_columns_that_do_not_go_together_are_a_fault(counts: list[int], words: list[int]) -> None:
    with pytest.raises(ValueError, match="A sampling mask has"):
        SamplingMask.of_columns(np.array(counts), np.array(words))
