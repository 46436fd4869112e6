"""Users' functions and environments that are named by a file, and start processes of their own."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from configs.data import DataConfig, FileSource
from configs.episodes import ClassEnvironment, EpisodesConfig, ToolsEnvironment
from configs.imports import imported
from configs.rewards import FunctionReward, RewardsConfig
from engines.environments.sessions import Environments
from engines.rewards.runner import RewardRunner

STARTS = '''
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor

class Text:
    def __init__(self, text): self.text = text

def length(text): return float(len(text.text if isinstance(text, Text) else text))

def pool(method, texts):
    with mp.get_context(method).Pool(1) as pool: return pool.map(length, map(Text, texts))

def spawn(completions): return pool("spawn", completions)
def forkserver(completions): return pool("forkserver", completions)
def fork(completions): return pool("fork", completions)
def executor(completions):
    with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
        return list(pool.map(length, completions))
def joblib(completions):
    import joblib
    return joblib.Parallel(2)(joblib.delayed(length)(one) for one in completions)

def measure(text: str) -> str:
    """Measure a text.

    Args:
        text: what is measured.
    """
    return str(spawn([text])[0])

class Game:
    def reset(self, **columns): return str(spawn(["12345"])[0])
    def measure(self, text: str) -> str:
        """Measure a text."""
        return measure(text)
'''


# A name that is no identifier, one of Python's own modules, and one of ours.
@pytest.mark.parametrize("base", ["starts.py", "my-starts.v2.py", "types.py", "engines.py"])
@pytest.mark.parametrize("start", ["spawn", "forkserver", "fork", "executor", "joblib"])
def test_a_reward_may_start_processes(
    tmp_path: Path, base: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if base != "starts.py" and start not in ("spawn", "joblib"):
        return
    if start == "joblib" and (find_spec("joblib") is None or base == "types.py"):
        return  # joblib's processes import types from the first folder that has it
    monkeypatch.setenv("JOBLIB_TEMP_FOLDER", str(tmp_path))  # a reward's process is killed
    file = tmp_path / base
    file.write_text(STARTS)
    rewards = RewardsConfig(functions=(FunctionReward(path=f"{file}:{start}"),), timeout=30)
    data = DataConfig(source=FileSource(path="none.jsonl"), template="plain")
    with RewardRunner(rewards, data) as runner:
        scores = runner.score(["?"] * 2, ["a", "bcd"], [{}] * 2)
    assert scores.failures == () and scores.rewards.tolist() == [1.0, 3.0]


def test_environments_and_tools_may(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "starts.py").write_text(STARTS.replace("measure", f"measure_{folder}"))
    first, second = tmp_path / "one" / "starts.py", tmp_path / "other" / "starts.py"
    game = EpisodesConfig(environment=ClassEnvironment(path=f"{first}:Game"), turn_timeout=30)
    with Environments(game) as environments:
        (outcome,) = environments.opening([{}], [0])
    assert (outcome.failed, outcome.observation) == (None, "5.0")
    paths = (f"{first}:measure_one", f"{second}:measure_other")
    tools = EpisodesConfig(environment=ToolsEnvironment(functions=paths), turn_timeout=30)
    with Environments(tools) as environments:
        names = [tool["function"]["name"] for tool in environments.start().tools]
    assert names == ["measure_one", "measure_other"]


def test_a_fresh_interpreter_with_this_path_imports_it(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(STARTS)
    length = imported(f"{tmp_path}/starts.py:length")
    code = f"import sys; sys.path[:] = {sys.path!r}; import {length.__module__} as m; print(m.length('ab'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"2.0\n"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(length, ["abc"]) == [3.0]
