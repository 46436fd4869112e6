"""Figures of two rewards side by side, against numbers worked out by hand."""

import numpy as np
import pytest

from engines.rewards.comparison import compare_rewards

NAN = float("nan")


def numbers(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def test_hand_worked_figures() -> None:
    old = numbers(0, 1, 2, 1, 1, 5)
    new = numbers(2, 1, 0, 0, 1, 9)
    groups = np.array([0, 0, 0, 1, 1, 2])
    found = compare_rewards(old, new, groups)
    assert (found.samples, found.failed, found.groups) == (6, 0, 2)
    assert found.mean == (pytest.approx(10 / 6), pytest.approx(13 / 6))
    assert found.spread[0] == pytest.approx(np.std([0, 1, 2, 1, 1, 5]))
    assert found.correlation == pytest.approx(np.corrcoef(old, new)[0, 1])
    assert (found.reordered, found.new_best) == (1, 1)  # the tie of group 1 is broken, not turned
    assert found.rank_change == pytest.approx((2 + 0 + 2 + 0.5 + 0.5) / 5)
    assert found.flipped == pytest.approx(2 / 6)  # samples 0 and 2
    assert found.silenced == 0
    assert found.woken == pytest.approx(2 / 6)  # samples 3 and 4


def test_a_shifted_and_scaled_reward_changes_nothing() -> None:
    old = numbers(0.1, 0.7, 0.3, 0.9)
    found = compare_rewards(old, old * 3 + 1, np.array([0, 0, 1, 1]))
    assert found.correlation == pytest.approx(1)
    assert (found.reordered, found.new_best, found.rank_change) == (0, 0, 0)
    assert (found.flipped, found.silenced, found.woken) == (0, 0, 0)


def test_a_constant_reward_silences_every_sample() -> None:
    found = compare_rewards(numbers(0, 1), numbers(0.1, 0.1), np.array([0, 0]))
    assert (found.correlation, found.silenced) == (None, 1.0)


def test_samples_without_a_reward_are_left_out() -> None:
    found = compare_rewards(numbers(0, 1, NAN, 3), numbers(NAN, 1, 2, 3), np.array([0, 0, 0, 0]))
    assert (found.samples, found.failed, found.groups) == (2, 1, 1)
    nothing = compare_rewards(numbers(NAN), numbers(NAN), np.array([0]))
    assert (nothing.samples, nothing.mean, nothing.flipped) == (0, (0.0, 0.0), 0.0)
