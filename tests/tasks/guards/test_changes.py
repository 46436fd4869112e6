"""What a rollback changes in a run's settings."""

from __future__ import annotations

import pytest

from configs.overrides import ConfigError
from tasks.guards.judging import check_rollbacks, settings_after
from tests.configs.test_guards import settings


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
        check_rollbacks(config)
        return
    with pytest.raises(ConfigError, match=said):
        check_rollbacks(config)
