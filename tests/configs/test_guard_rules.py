"""Guards that cannot be told apart, or whose metric the run does not have."""

from __future__ import annotations

import pytest

from configs.overrides import ConfigError
from tests.configs.test_guards import settings


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["guards=[{metric: x, above: 1}, {metric: x, below: 0}]"], "two are called x"),
        (["guards=[{metric: x, above: 1, action: synchronous}]"], "with max_staleness = 0 none do"),
        (["guards=[{preset: kl}]"], "the recipe has none. Set algorithm.kl.coefficient above 0"),
        (["guards=[{preset: kl}]", "algorithm.kl.coefficient=0.1", "algorithm.kl.placement=reward"],
         "Set its metric to advantage/kl_ref"),
        (["guards=[{metric: train/correction_effective_sample_size, below: 0.5}]"],
         "is of algorithm.correction, which is empty"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        settings(*words)
    assert "\n" not in str(caught.value)
