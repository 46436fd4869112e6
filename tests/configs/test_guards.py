"""Guards as settings: presets, what is refused, and those of earlier runs."""

from __future__ import annotations

import pytest

from configs.grpo import GRPOConfig
from configs.guards import PRESETS, GuardConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from storage.runs.run_store import renamed_settings


def settings(*words: str) -> GRPOConfig:
    return load_recipe(GRPOConfig, "tiny", list(words))


def test_every_preset_is_a_guard() -> None:
    for preset in PRESETS:
        own = {"metric": "eval/x/reward"} if preset == "evaluation_drop" else {}
        guard = GuardConfig.model_validate({"preset": preset, **own})
        assert guard.label == preset and guard.metric
        assert GuardConfig.model_validate(guard.model_dump(mode="json")) == guard


def test_what_is_given_goes_before_the_preset() -> None:
    guard = GuardConfig.model_validate({"preset": "reward_collapse", "below": 0.1, "patience": 7})
    assert (guard.metric, guard.bound, guard.patience) == ("reward/mean", ("below", 0.1), 7)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["guards=[{preset: evaluation_drop}]"], "evaluation_drop names no metric. Set its metric"),
        (["guards=[{metric: x}]"], "x has no bound, and a guard has one bound"),
        (["guards=[{metric: x, above: 1, below: 0}]"], "x has above and below, and a guard has one"),
        (["guards=[{metric: x, above: 1, rollback: {steps: 2}}]"], "its action is warn"),
        (["data.quarantine={}"], "data.quarantine has no bound"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + said.replace("(", r"\(")) as caught:
        settings(*words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stored", "guard"),
    [
        ({"metric": "train/rollout_mismatch", "bound": 0.1, "action": "stop", "patience": 2},
         {"metric": "train/rollout_mismatch", "above": 0.1, "action": "stop", "patience": 2}),
        ({"metric": "train/rollout_effective_sample_size", "bound": 0.5},
         {"metric": "train/rollout_effective_sample_size", "below": 0.5, "action": "synchronous"}),
    ],
)  # fmt: skip
def test_the_guard_of_earlier_runs_is_one_of_several(
    stored: dict[str, object], guard: dict[str, object]
) -> None:
    overlap = ["max_staleness=2", "algorithm.correction=[{kind: truncate}]"]
    today = settings(*overlap).model_dump(mode="json")
    del today["guards"]
    today["data"]["shuffle"] = today["data"].pop("order") == "shuffled"
    found = GRPOConfig.model_validate(renamed_settings({**today, "staleness_guard": stored}))
    assert found.guards == [GuardConfig.model_validate({"name": "staleness", **guard})]
    assert found.data.order == "shuffled"
    without = GRPOConfig.model_validate(renamed_settings({**today, "staleness_guard": None}))
    assert without.guards == []
    today["data"]["shuffle"] = False
    assert GRPOConfig.model_validate(renamed_settings(today)).data.order == "sequential"
