"""What workspaces need of the other settings; each refusal is one sentence."""

from __future__ import annotations

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe

CODING = ("data.source={kind: coding, path: rows.jsonl}", "rewards.functions=[{kind: environment}]")
AGENT = "episodes.environment={kind: agent, path: 'a.py:solve'}"


def load(*words: str) -> GRPOConfig:
    return load_recipe(GRPOConfig, "tiny", words)


def test_a_workspace_needs_coding_tasks_and_time() -> None:
    config = load(*CODING, "episodes.environment.kind=workspace", "episodes.turn_timeout=70")
    assert config.episodes is not None and config.episodes.workspace is None
    assert config.episodes.workspaces is not None and "coding" in config.features
    agent = load(*CODING, AGENT)
    assert agent.episodes is not None and agent.episodes.workspaces is None
    assert "coding" not in agent.features


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*CODING, "episodes.environment.kind=workspace"], "turn_timeout = 30 s is shorter than an answer of a workspace may take, 70 s"),
        ([CODING[1], AGENT, "episodes.workspace={}", "episodes.turn_timeout=70"], "rows of the source kind reasoning_gym have none"),
        ([*CODING, "episodes.environment={kind: class, path: 'a:B'}", "episodes.workspace={}"], "there is none of these"),
        ([*CODING, "episodes.environment.kind=workspace", "episodes.workspace.test_timeout=0"], "test_timeout"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match="^[^\n]+$") as error:
        load(*words)
    assert said in str(error.value)
