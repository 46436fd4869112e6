"""Behaviour-policy corrections and their metrics, by hand; parity covers the rest."""

import math

import pytest
import torch

from engines.algorithms.aggregation import Rows
from engines.algorithms.rollout_correction import (
    CORRECTIONS,
    Mismatch,
    band,
    correct,
    correction_metrics,
    dppo,
    effective_sample_size,
    off_policy_sequence,
    reject,
    truncate,
    veto,
)

LN2 = math.log(2)


def mismatch(ratios: list[list[float]], advantages: list[float] | None = None) -> Mismatch:
    """Rows of given ratios pi / pi_rollout; pi is 0.25 everywhere."""
    rows = Rows.of_lengths(torch.tensor([len(row) for row in ratios]))
    rho = torch.tensor([ratio for row in ratios for ratio in row], dtype=torch.float64)
    new = torch.full_like(rho, math.log(0.25))
    return Mismatch(
        rows=rows,
        mask=torch.ones_like(rho, dtype=torch.bool),
        logprobs=new,
        rollout_logprobs=new - rho.log(),
        advantages=None if advantages is None else rows.spread(torch.tensor(advantages)),
    )


def test_truncation_and_band_by_token_and_by_row():
    both = mismatch([[0.5, 4.0], [1.5], []])
    options = {"lower": None, "upper": 2.0, "normalize": False}
    assert truncate(both, level="token", **options).tolist() == pytest.approx([0.5, 2.0, 1.5])
    assert truncate(both, level="sequence", **options).tolist() == pytest.approx([2.0, 2.0, 1.5])
    unbounded = {**options, "upper": None}
    assert truncate(both, level="token", **unbounded).tolist() == pytest.approx([0.5, 4.0, 1.5])
    options["lower"] = 0.75
    assert truncate(both, level="token", **options).tolist() == pytest.approx([0.75, 2.0, 1.5])
    assert band(both, level="token", **options).tolist() == pytest.approx([0.0, 0.0, 1.5])
    options["normalize"] = True
    assert band(both, level="token", **options).tolist() == pytest.approx([0.0, 0.0, 3.0])


def test_rejection_by_token_by_mean_and_by_the_worst():
    both = mismatch([[0.5, 2.0], [4.0], [1.0, 1.1]])
    token = reject(both, statistic="token_k1", lower=None, upper=2.5)
    assert token.tolist() == [True, True, False, True, True]
    mean = reject(both, statistic="seq_mean_k1", lower=None, upper=1.05)
    assert mean.tolist() == [True, True, False, True, True]  # log 0.5 and log 2 cancel
    worst = reject(both, statistic="seq_max_k2", lower=None, upper=0.1)
    assert worst.tolist() == [False, False, False, True, True]
    bounds = reject(both, statistic="token_k1", lower=0.9, upper=3.0)  # of pi_rollout / pi
    assert bounds.tolist() == [True, False, False, True, True]


def test_binary_kl_is_the_larger_of_both_directions():
    both = mismatch([[0.5]])  # 0.25 against 0.5
    forward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    backward = 0.5 * LN2 + 0.5 * math.log(0.5 / 0.75)
    bound = max(forward, backward)
    options = {"statistic": "token_binary_kl", "lower": None}
    assert reject(both, upper=bound + 1e-6, **options).all()
    assert not reject(both, upper=bound - 1e-6, **options).any()


def test_veto_looks_at_the_least_likely_token():
    both = mismatch([[1.0, 1e-5], [1.0]])
    assert veto(both, floor=1e-4).tolist() == [False, False, True]


def test_dppo_mask_looks_at_the_direction_of_the_advantage():
    both = mismatch([[0.5], [0.5], [2.0], [2.0]], [1.0, -1.0, 1.0, -1.0])
    # pi = 0.25; pi_rollout = 0.5, 0.5, 0.125, 0.125.
    assert dppo(both, measure="tv", low=0.2, high=0.1).tolist() == [True, False, False, True]
    assert dppo(both, measure="kl", low=0.01, high=0.01).tolist() == [True, False, False, True]
    assert dppo(both, measure="tv", low=0.3, high=0.2).all()


def test_stale_rows_are_left_out_only_where_they_failed():
    both = mismatch([[0.5, 0.5], [0.5], [2.0]], [-1.0, 1.0, -1.0])
    assert off_policy_sequence(both, threshold=0.1).tolist() == [False, False, True, True]


def test_steps_combine_and_never_touch_masked_tokens():
    both = mismatch([[0.5, 4.0, 1.0]])
    hidden = Mismatch(
        rows=both.rows,
        mask=torch.tensor([True, True, False]),
        logprobs=both.logprobs,
        rollout_logprobs=torch.tensor([*both.rollout_logprobs[:2].tolist(), float("nan")]),
    )
    steps = [
        (truncate, {"level": "token", "lower": None, "upper": 2.0, "normalize": False}),
        (reject, {"statistic": "token_k2", "lower": None, "upper": 0.5}),
    ]
    weights, kept = correct(hidden, steps)
    assert weights.tolist() == pytest.approx([0.5, 2.0, 0.0])
    assert kept.tolist() == [True, False, False]


def test_a_logprob_that_is_not_known_counts_as_equal():
    both = mismatch([[0.5]])
    unknown = Mismatch(
        rows=both.rows,
        mask=both.mask,
        logprobs=both.logprobs,
        rollout_logprobs=torch.full_like(both.logprobs, float("nan")),
    )
    options = {"level": "token", "lower": None, "upper": 2.0, "normalize": False}
    assert truncate(unknown, **options).tolist() == [1.0]


def test_equal_policies_have_no_gap():
    both = mismatch([[1.0, 1.0], [1.0]])
    options = {"level": "token", "lower": None, "upper": 2.0, "normalize": False}
    gap = correction_metrics(both, [(truncate, options)])
    for name in ("kl", "k3_kl", "log_ppl_diff", "log_ppl_abs_diff", "chi2_token", "chi2_seq"):
        assert gap[name] == pytest.approx(0.0, abs=1e-12)
    assert gap["ppl_ratio"] == pytest.approx(1.0)
    assert gap["training_ppl"] == pytest.approx(4.0)
    assert gap["weight_eff_sample_size"] == pytest.approx(1.0)


def test_no_token_no_metrics():
    both = mismatch([[]])
    assert correction_metrics(both, []) == {}
    assert set(CORRECTIONS) >= {"truncate", "band", "reject", "veto", "dppo"}


def test_one_heavy_weight_is_worth_one_sample_of_n():
    for weights, share in (([2.0, 2.0, 2.0, 2.0], 1.0), ([0.0, 3.0, 0.0, 0.0], 0.25)):
        w = torch.tensor(weights)
        assert float(effective_sample_size(w.mean(), w.square().mean())) == pytest.approx(share)
    assert float(effective_sample_size(torch.zeros(()), torch.zeros(()))) == 0.0
