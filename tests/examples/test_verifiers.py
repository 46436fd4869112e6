"""Environments of verifiers 0.4 as agents, where an interpreter that has it is named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.data import DataConfig, FunctionSource
from configs.episodes import AgentEnvironment, EpisodesConfig
from configs.model import PretrainedModel, RandomModel
from engines.environments.sessions import Environments
from engines.episodes.contract import EnvironmentSpec
from engines.episodes.environment_engine import EnvironmentEngine
from engines.models.checkpoints import draw
from storage.batches.columns import Author
from tests.engines.environments.playing import begin_agent as begin
from tests.engines.environments.playing import call, new_messages, requests
from tests.engines.episodes.test_request_episodes import Rounds
from tests.flows.conftest import ROOT

PYTHON = os.environ.get("REFRAIN_TEST_VERIFIERS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON is None, reason="REFRAIN_TEST_VERIFIERS names no interpreter with verifiers 0.4"
    ),
]

TOOLS = """
import verifiers.v1 as vf


class Adding(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, one: int, other: int) -> int:
        \"\"\"The sum of two numbers.\"\"\"
        return one + other


class Task(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return [Adding(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float("5" in trace.last_reply)


class Tasks(vf.Taskset[Task]):
    def load(self):
        yield Task(vf.TaskData(prompt="2 + 3 =", system_prompt="Use a tool."))


__all__ = ["Tasks"]

if __name__ == "__main__":
    Adding.run()
"""

WITHOUT_END = """
import itertools

import verifiers.v1 as vf


class Config(vf.TasksetConfig):
    first: int = 0


class Task(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.prompt)


class Tasks(vf.Taskset[Task, Config]):
    INFINITE = True

    def load(self):
        for number in itertools.count(self.config.first):
            yield Task(vf.TaskData(prompt=f"say {number}"))


__all__ = ["Tasks"]
"""

Playing = Callable[..., Environments]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Playing]:
    """Makes environments of the example's agent, in a folder with both its tasks and those above."""
    for name in ("verifiers_agent.py", "verifiers_chat.py", "verifiers_sums.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    (tmp_path / "with_tools.py").write_text(TOOLS)
    (tmp_path / "without_end.py").write_text(WITHOUT_END)
    made: list[Environments] = []

    def play(**params: Any) -> Environments:
        agent = AgentEnvironment(path=f"{tmp_path}/verifiers_agent.py:play", params=params)
        config = EpisodesConfig(
            environment=agent, processes=1, turn_timeout=300.0, timeout=900.0, python=PYTHON
        )
        made.append(Environments(config))
        return made[-1]

    yield play
    for one in made:
        one.close()


@pytest.mark.parametrize("harness", ["null", "verifiers_chat"])
def test_an_environment_of_several_turns(play: Playing, harness: str) -> None:
    environments = play(max_turns=2, harness=harness)
    [opening] = environments.opening([{"task": 11}], [0])
    assert requests(opening)[0]["messages"] == [{"role": "user", "content": "1 + 3 ="}]
    right = begin(environments, task=11)
    outcome = right.act(environments, "it is 4", ())
    assert (outcome.reward, outcome.done, outcome.failed) == (1.0, True, None)
    wrong = begin(environments, name="two", task=11)
    outcome = wrong.act(environments, "it is 5", ())
    (request,) = requests(outcome)
    assert new_messages(request) == [{"role": "user", "content": "No. Again:"}]
    outcome = wrong.act(environments, "it is 6", ())
    assert (outcome.reward, outcome.done, outcome.failed) == (0.0, True, None)


@pytest.mark.parametrize("harness", ["null", "verifiers_chat"])
def test_an_episode_at_its_limit_is_scored(play: Playing, harness: str) -> None:
    environments = play(harness=harness)
    episode = begin(environments, task=11)
    episode.act(environments, "it is 5", ())
    assert episode.finish(environments).reward == 0.0


def test_a_set_without_an_end_and_with_settings(play: Playing) -> None:
    environments = play(
        taskset="without_end", settings='{"first": 40}', harness="verifiers_chat", max_turns=1
    )
    [opening] = environments.opening([{"task": 2}], [0])
    assert requests(opening)[0]["messages"] == [{"role": "user", "content": "say 42"}]
    assert begin(environments, task=2).act(environments, "say 42", ()).reward == 1.0


def test_an_environment_with_tools(play: Playing) -> None:
    environments = play(taskset="with_tools")
    [opening] = environments.opening([{"task": 0}], [0])
    (said,) = requests(opening)
    assert [one["role"] for one in said["messages"]] == ["system", "user"]
    (tool,) = (one["function"]["name"] for one in said["tools"])
    episode = begin(environments, task=0)
    outcome = episode.act(environments, "…", [call(tool, one=2, other=3)])
    (request,) = requests(outcome)
    (result,) = new_messages(request)
    assert (result["role"], result["content"]) == ("tool", "5")
    outcome = episode.act(environments, "5", ())
    assert (outcome.reward, outcome.done) == (1.0, True)


def test_its_train_client_renders_token_ids(tmp_path: Path) -> None:
    """What the model wrote stays as it was sampled; only the answer's tokens come from the client."""
    for name in ("verifiers_agent.py", "verifiers_sums.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    draw(RandomModel(), tmp_path / "policy")
    agent = AgentEnvironment(
        path=f"{tmp_path}/verifiers_agent.py:play",
        params={"max_turns": 2, "tokenizer": f"{tmp_path}/policy", "renderer": "default"},
    )
    source = FunctionSource(path=f"{tmp_path}/verifiers_agent.py:rows", params={"size": 64})
    engine = EnvironmentEngine(
        EnvironmentSpec(
            model=PretrainedModel(path=f"{tmp_path}/policy"),
            model_cache=f"{tmp_path}/models",
            data=DataConfig(source=source, template="chat"),
            episodes=EpisodesConfig(
                environment=agent, processes=1, turn_timeout=300.0, timeout=900.0, python=PYTHON
            ),
            max_new_tokens=100,
            store_uri=f"file://{tmp_path}/store",
            store_options={},
        )
    )
    try:
        rounds = Rounds(engine, tmp_path, row=11)
        assert rounds.read == ["user: 1 + 3 =\nassistant: "]
        rounds.says("it is 5")
        read = "\nuser: No. Again:\nassistant: "
        assert rounds.read == [f"user: 1 + 3 =\nassistant: it is 5{read}"]
        assert rounds.says("it is 4").failures == ()
        (ids,), (authors,) = rounds.column("response_ids"), rounds.column("author")
        assert rounds.tokenizer.decode(ids) == f"it is 5{read}it is 4"
        own = [Author.POLICY] * len("it is 5")
        assert authors == [*own, *[Author.ENVIRONMENT] * len(read), *own]
        assert rounds.column("episode") == ["done"]
        assert rounds.column("turn_rewards")[0][-1] == 1.0
    finally:
        engine.close()
