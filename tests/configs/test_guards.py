"""Guards as settings: presets, what is refused, what a rollback changes, and those of earlier runs."""

from __future__ import annotations

import pytest

from configs.grpo import GRPOConfig
from configs.guards import PRESETS, GuardConfig, check_rollbacks, settings_after
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from configs.stored import renamed_settings


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
        (["guards=[{metric: x, above: 1}, {metric: x, below: 0}]"], "two are called x"),
        (["guards=[{metric: x, above: 1, action: synchronous}]"], "with max_staleness = 0 none do"),
        (["guards=[{preset: kl}]"], "the recipe has none. Set algorithm.kl.coefficient above 0"),
        (["guards=[{preset: kl}]", "algorithm.kl.coefficient=0.1", "algorithm.kl.placement=reward"],
         "Set its metric to advantage/kl_ref"),
        (["guards=[{metric: train/correction_effective_sample_size, below: 0.5}]"],
         "is of algorithm.correction, which is empty"),
        (["data.quarantine={}"], "data.quarantine has no bound"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + said.replace("(", r"\(")) as caught:
        settings(*words)
    assert "\n" not in str(caught.value)


def test_factors_are_of_the_value_that_is_there() -> None:
    plain = settings().model_dump(mode="json")
    assert settings_after(
        plain, {"train.learning_rate": "x0.1", "group_size": "x2", "seed": 5}
    ) == [
        "train.learning_rate=0.0003",
        "group_size=8",
        "seed=5",
    ]
    with pytest.raises(ValueError, match="train.schedule = constant is no number to multiply"):
        settings_after(plain, {"train.schedule": "x0.1"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "model.layers: 3",
            "rollback.change of x has model.layers, which a run that goes back keeps",
        ),
        (
            "train.learning_rat: 3",
            "rollback.change of x: train.learning_rat: there is no such setting",
        ),
        ("train.learning_rate: -1", "rollback.change of x: train.learning_rate = -1"),
        ("train.schedule: x2", "is no number to multiply"),
        ("train.learning_rate: x0.5, data.order: difficulty, algorithm.kl.coefficient: 0.1", ""),
    ],
)
def test_what_a_rollback_would_change_to_is_checked_before(change: str, said: str) -> None:
    guard = f"{{metric: x, above: 1, action: rollback, rollback: {{change: {{{change}}}}}}}"
    config = settings(f"guards=[{guard}]")
    if not said:
        check_rollbacks(config, config.guards)
        return
    with pytest.raises(ConfigError, match=said):
        check_rollbacks(config, config.guards)


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
