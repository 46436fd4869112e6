"""How a flow begins that nobody has checked before: a server's worker calls it with settings alone."""

from __future__ import annotations

from typing import NoReturn

import pytest
import yaml

import tasks.train
from configs.grpo import GRPOConfig
from configs.recipe import find_recipe
from configs.resolving import Machine


class Checked(Exception):
    """The checks were asked; nothing is to start after them."""


def test_settings_that_a_worker_hands_over_are_resolved_before_they_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(config: GRPOConfig, resumed: bool) -> NoReturn:
        assert (config.rollout.dtype, config.rollout.shards, resumed) == ("float32", 4, False)
        raise Checked

    monkeypatch.setattr(tasks.train, "check", check)
    monkeypatch.setattr(tasks.train, "begin_process", lambda: None)
    monkeypatch.setattr(tasks.train, "close_to_others", lambda: None)
    slow = Machine(multiplies_bfloat16=False)
    monkeypatch.setattr(tasks.train, "this_machine", lambda: slow)
    raw = yaml.safe_load(find_recipe("tiny").read_text())
    raw |= {"rollout": {"engine": "transformers"}, "prompts_per_step": 4}
    config = GRPOConfig.model_validate(raw)
    with pytest.raises(Checked):
        tasks.train.train(lambda run, step: None, config, None, None, None)
