"""The check of an engine's weights: what it reports, and its log-probs against the trainer's."""

import math

import pytest

from engines.failures import WeightMismatch
from engines.rollout.contract import SyncReport
from engines.rollout.weight_probe import Probe, check_report, check_scores, mean_absolute_error
from storage.runs.weights import WeightsRef

PROBE = Probe(
    tokens=[[5, 6, 7, 8], [5, 9]], prompt_lengths=[2, 1], expected=lambda: [[-1.0, -2.0], [-3.0]]
)
WEIGHTS = WeightsRef(version=3, key="run/weights/v000003", digest="xxh3:1", nbytes=8)


def report(version: int = 3, digest: str = "xxh3:1") -> SyncReport:
    return SyncReport(
        version=version, digest=digest, tensors=1, nbytes=8, seconds=1.0, load_seconds=0.5
    )


def test_the_error_is_the_mean_over_all_tokens():
    assert mean_absolute_error([[-1.5, -2.0], [-2.0]], PROBE.expected()) == pytest.approx(0.5)


def test_a_score_within_the_tolerance_passes_and_one_beyond_it_names_the_worker():
    scores = [[-1.0, -2.3], [-3.0]]
    assert check_scores("rollout-0", 3, scores, PROBE, tolerance=0.1) == pytest.approx(0.1)
    with pytest.raises(WeightMismatch, match=r"version 3, rollout-0's .* by 0\.1000 nats"):
        check_scores("rollout-0", 3, scores, PROBE, tolerance=0.09)


def test_a_mismatch_says_how_far_each_length_is_off_and_what_to_look_at():
    with pytest.raises(WeightMismatch, match=r"0 of 2 tokens, 2 of 4 tokens\. .* window.* head"):
        check_scores("rollout-0", 3, [[-1.0, -6.0], [-3.0]], PROBE, tolerance=0.5)


def test_a_score_that_is_no_number_is_a_mismatch():
    with pytest.raises(WeightMismatch, match="nan nats"):
        check_scores("rollout-0", 3, [[-1.0, math.nan], [-3.0]], PROBE, tolerance=100.0)


def test_a_row_that_is_missing_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        check_scores("rollout-0", 3, [[-1.0, -2.0]], PROBE, tolerance=1.0)


@pytest.mark.parametrize("wrong", [report(version=2), report(digest="xxh3:2")])
def test_a_report_of_something_else_is_a_mismatch(wrong: SyncReport):
    check_report("rollout-0", report(), WEIGHTS)
    with pytest.raises(WeightMismatch, match=f"reports version {wrong.version} .* to version 3"):
        check_report("rollout-0", wrong, WEIGHTS)
