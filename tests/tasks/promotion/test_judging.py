"""The rule by which a policy version becomes the champion."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from configs.promotion import PromotionConfig
from engines.algorithms.evaluation import PairedTest
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from storage.tracking.registry import Registered
from tasks.promotion.judging import Evaluation, evaluation_of, judge
from tests.storage.audit import small_run
from tests.storage.evaluations.stored import stored_evaluation


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


def paired(difference: float, p_value: float) -> PairedTest:
    return PairedTest(prompts=20, difference=difference, low=-0.1, high=0.4, p_value=p_value)


@pytest.mark.parametrize(
    ("difference", "p_value", "margin", "wins"),
    [
        (0.2, 0.05, 0.0, True),
        (0.2, 0.051, 0.0, False),
        (0.2, 0.01, 0.3, False),
        (-0.2, 0.01, 0.0, False),
        (0.0, 0.01, 0.0, False),
    ],
)
def test_a_gain_that_may_be_chance_does_not_promote(
    difference: float, p_value: float, margin: float, wins: bool
) -> None:
    """Whatever is recorded in the registry: the stored evaluations decide."""
    rule = PromotionConfig(significance=0.05, margin=margin)
    decision = judge(evaluation(0.6), champion(0.1), rule, paired(difference, p_value))
    assert decision.promote is wins
    assert f"p = {p_value:.4g}" in decision.reason and "20 prompts" in decision.reason


def test_without_a_stored_evaluation_nothing_is_significant() -> None:
    decision = judge(evaluation(0.9), champion(0.1), PromotionConfig(significance=0.05))
    assert not decision.promote
    assert "evaluation.before = true" in decision.reason
    assert judge(evaluation(0.9), None, PromotionConfig(significance=0.05)).promote


def evaluated(
    run: RunStore, version: int, digest: str, on: str, failed: int = 0, at: float = 1.0
) -> str:
    """A stored evaluation that the run knows; its key."""
    name, metrics = f"{run.run}-{version}-{at}", {"reward": 1.0, "failed": float(failed)}
    stored_evaluation(run, name, version=version, digest=digest, on=on, metrics=metrics, made_at=at)
    return name


def test_the_champions_evaluation_is_that_of_its_weights_on_the_same_rows(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    old, new = RunStore(store, "old"), RunStore(store, "new")
    old.write_run({"config": {}, "code": "0.1.0", "flow": "flows.grpo:grpo"})
    digest = small_run.take(old, 1).version_out.digest
    rival = dataclasses.replace(champion(0.1), step=1, store_uri=store.uri)

    def found() -> str | None:
        result = evaluation_of(rival, new, "rows")
        return None if result is None else result.key

    assert found() is None
    evaluated(old, 1, digest, "other rows")
    evaluated(old, 1, digest, "rows", failed=1, at=2.0)
    evaluated(new, 5, "xxh3:other", "rows", at=3.0)
    assert found() is None
    assert evaluated(old, 1, digest, "rows", at=4.0) == found()
    assert evaluated(new, 0, digest, "rows", at=5.0) == found(), "of the run that began with it"
    elsewhere = dataclasses.replace(rival, store_uri="file:///elsewhere")
    assert evaluation_of(elsewhere, new, "rows") is None
    assert evaluation_of(dataclasses.replace(rival, run="gone"), new, "rows") is None


def test_latest_is_no_alias_to_promote_to() -> None:
    with pytest.raises(ValueError, match="MLflow's own alias"):
        PromotionConfig(alias="latest")
