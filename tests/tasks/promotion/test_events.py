"""A judged policy is shown on MLflow's page, on the dashboard and to automations; once, after the steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from configs.grpo import GRPOConfig
from configs.promotion import PromotionConfig
from configs.recipe import load_recipe
from tasks.promotion import judging, listener
from tasks.promotion.judging import PolicyJudged
from tasks.promotion.listener import listen
from tasks.run.events import Listeners, Reports
from tasks.run.features import features_of

JUDGED = PolicyJudged(
    version=4, promoted=True, reason="There is no champion yet.", alias="champion", model="m",
    number="2", reward=0.5, error=0.01, samples=8, failed=0, truncated=1,
)  # fmt: skip


@pytest.mark.parametrize("promoted", [True, False])
def test_everybody_hears_of_it(monkeypatch: pytest.MonkeyPatch, promoted: bool) -> None:
    told: list[Any] = []
    monkeypatch.setattr(listener, "emit", lambda event, run, **facts: told.append((event, facts)))
    monkeypatch.setattr(
        listener, "create_markdown_artifact", lambda **page: told.append(page["description"])
    )
    tracking: Any = SimpleNamespace(tag=lambda name, value: told.append((name, value)))
    facts: Any = SimpleNamespace(name="r")
    listeners = Listeners()
    listen(facts, Reports(listeners=listeners, tracking=tracking))
    event: Any = {name: getattr(JUDGED, name) for name in PolicyJudged.__slots__}
    listeners.tell(PolicyJudged(**event | {"promoted": promoted}))
    assert told == [
        ("refrain.promotion", "There is no champion yet."),
        f"Promotion of r: {'is now the champion' if promoted else 'did not become the champion'}.",
        (
            "refrain.policy.promoted" if promoted else "refrain.policy.not-promoted",
            {"version": 4, "reason": "There is no champion yet."},
        ),
    ]


SUITES = ["evaluation.suites=[gsm8k, math500]", "promotion={alias: champion, suite: math500}"]


@pytest.mark.parametrize("before", [True, False])
def test_the_policy_is_judged_after_the_steps_unless_it_was(
    monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    asked: list[tuple[object, PromotionConfig]] = []
    monkeypatch.setattr(judging, "judged_before", lambda run: before)
    monkeypatch.setattr(judging, "promote", lambda run, result, rule: asked.append((result, rule)))
    run: Any = SimpleNamespace(config=load_recipe(GRPOConfig, "tiny", SUITES))
    results: Any = {"gsm8k": "of gsm8k", "math500": "of math500"}
    (feature,) = features_of(run.config)
    feature.after_steps(run, results)
    assert asked == ([] if before else [("of math500", run.config.promotion)])
    feature.after_steps(run, None)
    assert len(asked) == (not before), "nothing was tested"
    assert features_of(load_recipe(GRPOConfig, "tiny", [])) == []
