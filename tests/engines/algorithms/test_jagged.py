"""Sums over rows, against plain Python; gradients against finite differences."""

import pytest
import torch

from engines.algorithms.aggregation import BLOCK, Rows, cumulative_sums, discounted_sums, divide
from engines.algorithms.group_advantages import moments, whitened
from tests.engines.algorithms.batches import random_rows

LENGTHS = torch.tensor([3, 0, 1, 4, 0])


def test_rows_know_their_tokens():
    rows = Rows.of_lengths(LENGTHS)
    assert rows.ids.tolist() == [0, 0, 0, 2, 3, 3, 3, 3]
    assert rows.within().tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert rows.lengths.tolist() == LENGTHS.tolist()
    assert rows.count == 5


def test_a_padded_matrix_is_rows_of_equal_length():
    rows = Rows.padded(2, 3)
    assert rows.offsets.tolist() == [0, 3, 6]
    assert rows.ids.tolist() == [0, 0, 0, 1, 1, 1]


def test_sums_means_and_extremes_of_rows():
    rows = Rows.of_lengths(LENGTHS)
    values = torch.tensor([1.0, 2.0, float("nan"), 4.0, 5.0, 6.0, 7.0, float("inf")])
    mask = torch.tensor([1, 1, 0, 0, 1, 1, 1, 0]) > 0
    assert rows.masked_sum(values, mask).tolist() == [3, 0, 0, 18, 0]
    assert rows.masked_mean(values, mask).tolist() == [1.5, 0, 0, 6, 0]
    assert rows.masked_max(values, mask, empty=-1.0).tolist() == [2, -1, -1, 7, -1]
    assert rows.masked_min(values, mask, empty=-1.0).tolist() == [1, -1, -1, 5, -1]
    assert [found.tolist() for found in rows.kept(mask).rows.ends()] == [[0, 3], [1, 4]]
    assert rows.kept(mask).rows.lengths.tolist() == [2, 0, 0, 3, 0]
    assert rows.kept(mask).rows.ids.tolist() == [0, 0, 3, 3, 3]
    kept = rows.kept(mask)
    assert kept.take(values).tolist() == [1, 2, 5, 6, 7]
    assert kept.put(torch.arange(1.0, 6.0)).tolist() == [1, 2, 0, 0, 3, 4, 5, 0]


def test_running_sums_start_anew_in_each_row():
    rows = Rows.of_lengths(LENGTHS)
    values = torch.arange(1.0, 9.0)
    assert cumulative_sums(values, rows).tolist() == [1, 3, 6, 4, 5, 11, 18, 26]


def test_no_rows_and_no_tokens():
    for lengths in (torch.zeros(0, dtype=torch.long), torch.zeros(3, dtype=torch.long)):
        rows = Rows.of_lengths(lengths)
        nothing, mask = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
        assert rows.sum(nothing).tolist() == [0.0] * len(lengths)
        assert rows.masked_mean(nothing, mask).tolist() == [0.0] * len(lengths)
        assert rows.kept(mask).rows.ends()[1].numel() == 0
        assert discounted_sums(nothing, rows, 0.9).numel() == 0


def test_gradients_of_sum_and_spread_agree_with_finite_differences():
    rows = Rows.of_lengths(LENGTHS)
    values = torch.randn(8, dtype=torch.float64, requires_grad=True)
    per_row = torch.randn(5, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda v: rows.sum(v * v), values)
    torch.autograd.gradcheck(lambda v: rows.spread(v * v), per_row)
    torch.autograd.gradgradcheck(lambda v: rows.sum(v * v), values)


def test_division_by_zero_is_zero_with_zero_gradient():
    top = torch.tensor([1.0, 2.0], requires_grad=True)
    result = divide(top, torch.tensor([0.0, 4.0]))
    result.sum().backward()
    assert result.tolist() == [0.0, 0.5]
    assert top.grad.tolist() == [0.0, 0.25]


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("longest", [5, BLOCK, 3 * BLOCK + 1])
def test_discounted_sums_equal_the_recurrence(decay, longest):
    lengths = torch.tensor([longest, 0, 1, longest // 2 + 1, 2])
    rows = Rows.of_lengths(lengths)
    values = torch.randn(int(lengths.sum()), dtype=torch.float64)
    expected = torch.zeros_like(values)
    for start, stop in zip(rows.offsets[:-1].tolist(), rows.offsets[1:].tolist(), strict=True):
        running = 0.0
        for t in range(stop - 1, start - 1, -1):
            running = float(values[t]) + decay * running
            expected[t] = running
    torch.testing.assert_close(discounted_sums(values, rows, decay), expected)


def test_whitening_has_mean_zero_and_variance_one():
    _, mask, generator = random_rows(3, 6)
    values = torch.randn(mask.numel(), generator=generator, dtype=torch.float64) * 5 + 2
    white = whitened(values, mask.double())[mask]
    torch.testing.assert_close(white, whitened(values[mask]))
    torch.testing.assert_close(
        white.mean(), torch.zeros((), dtype=torch.float64), atol=1e-12, rtol=0
    )
    torch.testing.assert_close(white.var(), torch.ones((), dtype=torch.float64))
    assert moments(values, torch.zeros_like(values)) == (0, 0)


def test_whitening_counts_a_value_as_often_as_it_is_told():
    values = torch.tensor([1.0, 4.0, float("nan")], dtype=torch.float64)
    counts = torch.tensor([3.0, 2.0, 0.0], dtype=torch.float64)
    long = torch.tensor([1.0, 1.0, 1.0, 4.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(whitened(values, counts)[:2], whitened(long)[[0, 3]])
    mean, variance = moments(values, counts)
    assert (float(mean), float(variance)) == (pytest.approx(2.2), pytest.approx(2.7))
    assert whitened(values[:1]).tolist() == [0.0]
