"""The rule by which a policy version becomes the champion."""

from __future__ import annotations

import math

import pytest

from configs.retraining import PromotionConfig
from storage.tracking.registry import Registered
from tasks.promotion import Evaluation, judge


def evaluation(reward: float, failed: int = 0, on: str = "rows") -> Evaluation:
    return Evaluation(
        version=4, reward=reward, error=0.01, samples=8, failed=failed, truncated=0, on=on
    )


def champion(reward: float | None, on: str = "rows") -> Registered:
    return Registered(
        model="m",
        number="1",
        run="old",
        step=9,
        store_uri="file:///s",
        evaluation=reward,
        evaluated_on=on,
    )


@pytest.mark.parametrize(
    ("mine", "theirs", "margin", "wins"),
    [
        (0.50, 0.40, 0.0, True),
        (0.40, 0.40, 0.0, False),
        (0.50, 0.40, 0.2, False),
        (0.75, 0.25, 0.5, True),
        (-1.0, -2.0, 0.5, True),
    ],
)
def test_the_champion_has_to_be_beaten_by_the_margin(
    mine: float, theirs: float, margin: float, wins: bool
) -> None:
    decision = judge(evaluation(mine), champion(theirs), PromotionConfig(margin=margin))
    assert decision.promote is wins
    assert f"{mine:.4f}" in decision.reason and f"{theirs:.4f}" in decision.reason


def test_the_first_version_needs_no_rival() -> None:
    assert judge(evaluation(0.1), None, PromotionConfig()).promote


def test_a_failure_is_never_a_result() -> None:
    for bad in (evaluation(0.9, failed=1), evaluation(math.nan)):
        decision = judge(bad, champion(0.1), PromotionConfig())
        assert not decision.promote
        assert "could not be scored" in decision.reason


def test_only_like_is_compared_with_like() -> None:
    for rival in (champion(None), champion(0.1, on="others")):
        decision = judge(evaluation(0.9), rival, PromotionConfig())
        assert not decision.promote
        assert "cannot be compared" in decision.reason


def test_latest_is_no_alias_to_promote_to() -> None:
    with pytest.raises(ValueError, match="MLflow's own alias"):
        PromotionConfig(alias="latest")
