"""Promotions that have nothing to go by, and which suite decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.overrides import ConfigError
from tests.configs.test_evaluation import tiny
from tests.tasks.launch import test_deployment_file as files


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluation.suites=[gsm8k, math500]", "promotion.alias=a"], "Set promotion.suite"),
        (["evaluation.suites=[gsm8k]", "promotion.suite=math500"], "is no suite of the run"),
        (["promotion.alias=a"], "needs an evaluation to go by"),
        (["evaluation.suites=[gsm8k]", "evaluation.every=2", "evaluation.at_end=false",
          "promotion.alias=a"], "does not test it. Set evaluation.at_end = true"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny(*words)


def test_a_teams_nightly_deployment_promotes_as_it_comes(tmp_path: Path) -> None:
    assert files.settings(files.team(tmp_path), "nightly")["promotion.alias"] == "champion"
