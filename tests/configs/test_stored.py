"""Settings of runs that earlier versions stored are read as those of today."""

from __future__ import annotations

import copy

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from storage.runs.run_store import upgraded_settings


def test_settings_of_version_1_are_read() -> None:
    today = load_recipe(GRPOConfig, "tiny").model_dump(mode="json")
    stored = copy.deepcopy(today)
    stored["rollout"]["shards_in_flight"] = 2
    stored["rewards"]["functions"][0]["path"] = "engines.scorers:share_of_digits"
    before = copy.deepcopy(stored)
    assert upgraded_settings(stored) == today
    assert GRPOConfig.model_validate(upgraded_settings(stored)).rollout.shards == 2
    assert stored == before
