"""The experts of tokens as samples carry them."""

import numpy as np
import pytest

from engines.models.routed_experts import as_ids, checked, extended, merged, no_tokens


def _of(*ids: int, dtype: type = np.uint8) -> np.ndarray:
    """One expert of each token, in one layer."""
    return np.array(ids, dtype).reshape(-1, 1, 1)


def test_the_format_has_room_for_what_is_not_known() -> None:
    assert no_tokens(3, 2, 255).dtype == np.uint8
    assert no_tokens(3, 2, 256).dtype == np.uint16  # 255 is an expert
    assert no_tokens(3, 2, 256).shape == (0, 3, 2)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_further_tokens_are_not_known(dtype: type) -> None:
    assert as_ids(extended(_of(4, 0, dtype=dtype), 4)).flatten().tolist() == [4, 0, -1, -1]


def test_what_was_sampled_stands_before_what_is_computed_now() -> None:
    before = extended(_of(1, 2), 4)  # two of the environment's follow
    before[3] = 9
    assert merged(before, _of(3, 3, 3, 3, 3)).flatten().tolist() == [1, 2, 3, 9, 3]
    assert merged(no_tokens(1, 1, 8), _of(3, 5)).flatten().tolist() == [3, 5]
    assert as_ids(merged(extended(_of(1), 3), _of(4, 5))).flatten().tolist() == [1, 5, -1]


def test_one_unknown_expert_makes_a_tokens_choice_unknown() -> None:
    before = np.array([[[1, 255]], [[1, 2]]], np.uint8)
    now = np.array([[[3, 4]], [[3, 4]]], np.uint8)
    assert merged(before, now).tolist() == [[[3, 4]], [[1, 2]]]


def test_what_is_no_experts_of_the_model_is_refused() -> None:
    like = no_tokens(2, 2, 8)
    good = np.zeros((5, 2, 2), np.int64)
    assert checked(good, like, 8).dtype == np.uint8
    with pytest.raises(ValueError, match=r"shape \(5, 3, 2\), and the model has 2 layers with 2"):
        checked(np.zeros((5, 3, 2), np.int64), like, 8)
    good[3, 1, 0] = 8
    with pytest.raises(ValueError, match="expert 8 of a token, and the model has 8"):
        checked(good, like, 8)
