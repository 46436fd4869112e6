"""What a run that goes on from a form begins with."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from configs.resume import ResumeConfig
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tasks.commands.resume import settings_for


@pytest.fixture
def files(tmp_path: Path) -> RunStore:
    """A run that was begun in another place."""
    found = RunStore(Store(f"file://{tmp_path}/store"), "tiny-1")
    config = load_recipe(
        GRPOConfig, "tiny", ["store.uri=file:///elsewhere", "store.keep_versions=7"]
    )
    found.write_run({"config": config.model_dump(mode="json"), "flow": "flows.grpo:grpo"})
    return found


def test_all_stays_but_what_is_named(files: RunStore) -> None:
    uri = files.store.uri
    asked = ResumeConfig.model_validate(
        {"run": "tiny-1", "steps": 9, "settings": ["data.epochs=3"], "store": {"uri": uri}}
    )
    found = settings_for(files, GRPOConfig, asked)
    assert (found.steps, found.data.epochs) == (9, 3)
    assert (found.store.uri, found.store.keep_versions) == (uri, 7)
    before = settings_for(files, GRPOConfig, ResumeConfig.model_validate({"run": "tiny-1"}))
    assert before.steps == load_recipe(GRPOConfig, "tiny").steps


def test_a_setting_that_is_none_is_refused_in_a_sentence(files: RunStore) -> None:
    asked = ResumeConfig.model_validate({"run": "tiny-1", "settings": ["stepz=3"]})
    with pytest.raises(ConfigError, match="stepz: there is no such setting. Did you mean steps"):
        settings_for(files, GRPOConfig, asked)
