"""Bounds of the quarantine that cannot be measured are refused."""

from __future__ import annotations

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.quarantine={seconds: 3}"], "episodes = null has none"),
        (["data.quarantine={no_variance: 3}", "group_size=1"], "has one, which never varies"),
    ],
)
def test_a_bound_that_nothing_reaches_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_recipe(GRPOConfig, "tiny", words)
    assert "\n" not in str(caught.value)
