"""Runs whose name is given: begun once, then gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from storage.objects.store import Store
from storage.runs.live import End, write_end
from storage.runs.run_lease import RunLease
from storage.runs.run_store import RunStore
from tasks.run import opening
from tasks.run.opening import begun, finished, wait_for_writer


def config_for(folder: Path) -> GRPOConfig:
    return load_recipe(GRPOConfig, "tiny", [f"store.uri={folder.as_uri()}", "steps=3"])


def test_it_is_begun_once(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    assert not begun(config, "sums-1")
    RunStore(Store(config.store.uri), "sums-1").write_run({"config": {}, "flow": "flows.grpo:grpo"})
    assert begun(config, "sums-1")
    assert finished(config, "sums-1") == ""
    with pytest.raises(ConfigError, match="is no name for a run"):
        begun(config, "../sums")


def test_it_is_finished_when_all_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(tmp_path)
    run = RunStore(Store(config.store.uri), "sums-1")
    run.write_run({"config": {}, "flow": "flows.grpo:grpo"})
    monkeypatch.setattr(opening, "head", lambda files: 3)
    assert finished(config, "sums-1") == ""  # its policy is still to be tested
    write_end(run, End(step=3))
    assert finished(config, "sums-1") == "Run sums-1 is finished: 3 of 3 steps are committed."
    assert finished(config.model_copy(update={"steps": 4}), "sums-1") == ""


def test_it_is_said_that_a_writer_may_still_be_there(tmp_path: Path) -> None:
    run = RunStore(Store(tmp_path.as_uri()), "sums-1")
    assert wait_for_writer(run) == ""
    RunLease.acquire(run, "the flow of a pod")
    assert wait_for_writer(run).startswith(
        "Run sums-1 may still be written by the flow of a pod on "
    )
