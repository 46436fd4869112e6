"""mini-swe-agent, unchanged, puts a repository right, where an interpreter that has it is named."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

from configs.coding import CodingSource, WorkspaceConfig
from configs.episodes import AgentEnvironment, EpisodesConfig
from engines.environments.sessions import Environments
from storage.prompts.datasets import open_source
from tests.engines.environments.playing import begin_agent as begin
from tests.engines.environments.playing import call, new_messages, requests
from tests.flows.conftest import ROOT

PYTHON = os.environ.get("REFRAIN_TEST_CLIENTS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="REFRAIN_TEST_CLIENTS names no interpreter"),
]
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def test_commands_run_in_the_workspace_and_the_tests_are_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runpy.run_path(str(ROOT / "examples/coding_tasks.py"))["write"](tmp_path)
    [row] = open_source(CodingSource(path=f"{tmp_path}/rows.jsonl")).rows([2])
    config = EpisodesConfig(
        environment=AgentEnvironment(path=f"{ROOT}/examples/mini_swe.py:solve"),
        workspace=WorkspaceConfig(test_timeout=60.0),
        processes=1,
        turn_timeout=300.0,
        timeout=900.0,
        python=PYTHON,
    )
    with Environments(config) as environments:
        episode = begin(environments, **row)
        outcome = episode.act(environments, "…", [call("bash", command="pwd; ls; false")])
        assert outcome.failed is None, outcome.failed
        [told] = new_messages(requests(outcome)[0])
        assert "<returncode>1</returncode>" in told["content"]
        assert "/tmp/work/repository\nintervals.py\ntests" in told["content"]
        fix = "sed -i 's/start < found/start <= found/' intervals.py"
        assert episode.act(environments, "…", [call("bash", command=fix)]).failed is None
        outcome = episode.act(environments, "…", [call("bash", command=SUBMIT)])
        assert outcome.failed is None, outcome.failed
        assert outcome.done and outcome.reward == 1
        limited = begin(environments, name="at a limit", **row).finish(environments)
        assert limited.failed is None and limited.reward == 0
