"""Episodes in workspaces, in processes of environments that die and are started again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs.episodes import EpisodesConfig
from engines.environments.sessions import Environments
from storage.objects.documents import Row
from tests.engines.environments.coding.conftest import SETTINGS, TASKS
from tests.engines.environments.playing import begin, begin_agent, call
from tests.flows.conftest import ROOT

Make = Callable[..., Environments]
FIX = call(
    "edit_file",
    path=TASKS["roman"].fixed[0],
    old=TASKS["roman"].fixed[1],
    new=TASKS["roman"].fixed[2],
)
TEST = call("bash", command="python3 -m unittest tests/test_small.py")


@pytest.fixture
def environments(cache: Path) -> Iterator[Make]:
    made: list[Environments] = []

    def make(**environment: Any) -> Environments:
        config = EpisodesConfig(
            environment=environment or {"kind": "workspace"},  # type: ignore[arg-type]
            workspace=SETTINGS,
            processes=1,
            turn_timeout=200.0,
            timeout=900.0,
        )
        made.append(Environments(config))
        return made[-1]

    yield make
    for one in made:
        one.close()


def below(opened: Environments) -> set[int]:
    """Its process, and the sandboxes below it."""
    process = psutil.Process(opened._players[0].process._process.pid)  # type: ignore[attr-defined]
    return {process.pid, *(child.pid for child in process.children(recursive=True))}


def test_tools_and_tests(environments: Make, rows: dict[str, Row]) -> None:
    opened = environments()
    names = [tool["function"]["name"] for tool in opened.start().tools]
    assert names == ["bash", "edit_file", "read_file", "write_file"]
    episode = begin(opened, **rows["roman"])
    outcome = episode.act(
        opened, "…", [call("read_file", path="roman.py"), call("bash", command="ls")]
    )
    assert outcome.results[0] == TASKS["roman"].files["roman.py"]
    assert outcome.results[1] == "roman.py\ntests"
    wrong = [call("read_file", path="/etc/passwd"), call("bash"), call("sing")]
    outcome = episode.act(opened, "…", wrong)
    assert [one.split(":")[0] for one in outcome.results] == ["Error"] * 3
    outcome = episode.act(opened, "…", [FIX])
    assert outcome.results == ("roman.py has been changed.",)
    outcome = episode.act(opened, "I am done.", ())
    assert outcome.done and outcome.reward is None
    assert episode.finish(opened).reward == 1


def test_a_killed_process_is_replaced_and_the_episode_played_again(
    environments: Make, rows: dict[str, Row]
) -> None:
    """By the stored turns, whose answers are the same; nothing of the old one is left."""
    opened = environments()
    episode = begin(opened, **rows["roman"])
    first = episode.act(opened, "…", [TEST])
    assert "OK" in first.results[0]
    episode.act(opened, "…", [FIX])
    before = below(opened)
    process = opened._players[0].process._process  # type: ignore[attr-defined]
    os.kill(process.pid, signal.SIGKILL)
    outcome = episode.act(opened, "…", [call("bash", command="grep -c CM roman.py")])
    assert outcome.failed is None and outcome.results == ("1",), outcome
    assert episode.finish(opened).reward == 1
    give_up = time.monotonic() + 20
    while any(map(psutil.pid_exists, before)) and time.monotonic() < give_up:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, before))


def test_a_sandbox_that_is_killed_costs_no_reward(environments: Make, rows: dict[str, Row]) -> None:
    opened = environments()
    episode = begin(opened, **rows["roman"])
    episode.act(opened, "…", [FIX])
    process = opened._players[0].process._process  # type: ignore[attr-defined]
    for sandbox in psutil.Process(process.pid).children():
        sandbox.kill()
    outcome = episode.act(opened, "…", [call("bash", command="grep -c CM roman.py")])
    assert outcome.failed is None and outcome.results == ("1",), outcome


def test_a_row_that_judges_nothing_fails_by_a_sentence(
    environments: Make, rows: dict[str, Row]
) -> None:
    opened = environments()
    [outcome] = opened.opening([{**rows["roman"], "fail_to_pass": ["true"]}], [1])
    assert outcome.failed == "fail_to_pass passes before any change, and so judges nothing"


AGENTS = """
import asyncio, json, urllib.request

def asked(base_url, api_key, chat):
    body = json.dumps({"model": "policy", "messages": chat}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

def solve(base_url, api_key, problem, workspace):
    said = asked(base_url, api_key, [{"role": "user", "content": problem}])
    workspace.bash(said)
    return workspace.reward()

async def solve_async(base_url, api_key, workspace, **row):
    assert row["problem"]
    said = await asyncio.to_thread(asked, base_url, api_key, [{"role": "user", "content": "go"}])
    await asyncio.to_thread(workspace.bash, said)
    return await asyncio.to_thread(workspace.reward)

def without(base_url, api_key):
    return 0.0
"""


@pytest.mark.parametrize("name", ["solve", "solve_async"])
def test_an_agent_has_a_workspace(
    name: str, environments: Make, rows: dict[str, Row], tmp_path: Path
) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    opened = environments(kind="agent", path=f"{tmp_path}/agents.py:{name}")
    episode = begin_agent(opened, **rows["roman"])
    outcome = episode.act(opened, "sed -i 's/(500/(900, \"CM\"), (500/' roman.py")
    assert (outcome.failed, outcome.done, outcome.reward) == (None, True, 1.0)
    episode.finish(opened)
    give_up = time.monotonic() + 20
    while len(below(opened)) > 1 and time.monotonic() < give_up:
        time.sleep(0.1)
    assert len(below(opened)) == 1, "its sandbox has ended"


def test_an_agent_without_the_argument_is_refused(environments: Make, tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    opened = environments(kind="agent", path=f"{tmp_path}/agents.py:without")
    with pytest.raises(ValueError, match=r"takes no argument workspace.*Let it take workspace"):
        opened.start()


def test_the_example_agent(environments: Make, rows: dict[str, Row]) -> None:
    opened = environments(kind="agent", path=f"{ROOT}/examples/coding_agent.py:solve")
    episode = begin_agent(opened, **rows["versions"])
    outcome = episode.act(opened, "I look.\n```bash\ncat versions.py\n```\n")
    assert outcome.failed is None and 'version.split(".")' in outcome.observation.replace("\\", "")
    _, old, new = TASKS["versions"].fixed
    script = f"s = open('versions.py').read()\nopen('versions.py', 'w').write(s.replace({old!r}, {new!r}))"
    episode.act(opened, f"```\npython3 - <<'EOF'\n{script}\nEOF\n```")
    assert episode.act(opened, "done").reward == 1
