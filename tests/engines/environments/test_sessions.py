"""Episodes in processes of their own: contracts, hangs, crashes, replay, other interpreters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs.episodes import (
    ClassEnvironment,
    EpisodesConfig,
    GymnasiumEnvironment,
    TextArenaEnvironment,
    ToolsEnvironment,
)
from engines.environments.protocol import SECONDS, TURN_SECONDS, EnvironmentReady, Outcome
from engines.environments.sessions import Environments, digest_of
from tests.engines.environments.playing import Episode, begin, call

ENVIRONMENTS = '''
import asyncio, math, os, random, sys, time
from typing import Literal, Optional

class Counter:
    """With tools."""

    def __init__(self, limit: int = 3) -> None:
        self.limit = limit
        self.done = False

    def reset(self, start: int, seed: int = 0) -> str:
        self.value = start
        return f"counting from {start} with seed {seed}"

    def add(self, number: int, unit: Optional[Literal["one", "ten"]] = None) -> dict:
        """Add to the value.

        Args:
            number: how much,
                of the unit.
            unit (str): what it counts.

        Returns:
            The value.
        """
        self.value += int(number) * (10 if unit == "ten" else 1)
        return {"value": self.value}

    async def say(self, text: str) -> str:
        """Say a text."""
        await asyncio.sleep(0)
        return text

    def fail(self) -> None:
        """Fail."""
        raise KeyError("no such thing")

    def finish(self) -> None:
        """End it all."""
        self.done = True

    def fill(self) -> None:
        """Use up the memory."""
        self.filled = [bytearray(2**24) for _ in range(64)]

    def get_reward(self) -> float:
        return self.value / 2

    @property
    def odd(self):
        raise RuntimeError("nobody asked")

class Texts:
    """With text; its actions say how it misbehaves."""

    def __init__(self, log: str = "") -> None:
        self.log = log

    def reset(self, **row):
        self.row = row
        if row.get("slow"):
            time.sleep(600)
        if row.get("raise"):
            raise ValueError("no such row")
        self.said = [str(random.random())]
        return f"hello {row.get('name')} {self.said[0]}"

    def step(self, text):
        if self.log:
            with open(self.log, "a") as file:
                file.write(text + "\\n")
        if text == "hang": time.sleep(600)
        if text == "exit": os._exit(3)
        if text == "quit": sys.exit("enough")
        if text == "kill": os.kill(os.getpid(), 9)
        if text == "raise": raise KeyError("no such thing")
        if text == "number": return 3
        if text == "long": return "é" * 2**19
        if text == "two": return "a", 1.0
        if text == "done": return "bye", 0.5, True
        if text == "quiet": return None
        if text == "set": return " ".join({"one", "two", "three", "four", "five"})
        if text == "process": return str(os.getpid())
        if text == "nap": time.sleep(0.15)
        rewards = {"nan": math.nan, "inf": -math.inf, "bool": True, "text": "1.0", "huge": 1e39}
        if text in rewards: return "", rewards[text], False
        self.said.append(text)
        return f"{len(self.said)} {text} {random.random():.6f}"

class Slow:
    """As slow as it is told."""

    def reset(self, seconds):
        self.seconds = seconds
        return "slow"

    def step(self, text):
        time.sleep(float(text))
        return "slow"

    def get_reward(self):
        time.sleep(self.seconds)
        return 0.25

class Opens:
    """Slow at its reset."""

    def reset(self, log):
        with open(log, "a") as file:
            file.write("reset\\n")
        time.sleep(0.3)
        return "open"

    def step(self, text): pass

class Hoards:
    """Keeps what it makes."""
    kept = []

    def reset(self):
        pass

    def step(self, text):
        self.kept.append(bytearray(int(text) * 2**20))
        return "kept"

class Numbers:
    """With numpy's global generator, which is not loaded at first."""

    def reset(self):
        pass

    def step(self, text):
        import numpy as np
        if text == "seed": np.random.seed(0)
        return f"{np.random.random():.6f}" if text == "draw" else ""

class Undocumented:
    def reset(self): pass
    def tool(self, a: int): pass

class Untyped:
    def reset(self): pass
    def tool(self, a):
        """Do it."""

class Idle:
    def reset(self): pass

class Resetless:
    def step(self, text): pass

def makes(limit):
    return Counter(limit)

not_a_class = 3
'''

Playing = Callable[..., Environments]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_envs.py").write_text(ENVIRONMENTS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def play() -> Iterator[Playing]:
    """Makes environments of a class of the file above."""
    made: list[Environments] = []

    def play(name: str, params: Any = None, sessions: int = 256, **settings: Any) -> Environments:
        path = name if ":" in name else f"my_envs:{name}"
        environment = ClassEnvironment(path=path, params=params or {})
        settings = {"processes": 1, "turn_timeout": 20.0, **settings}
        made.append(Environments(EpisodesConfig(environment=environment, **settings), sessions))
        return made[-1]

    yield play
    for one in made:
        one.close()


def children() -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process().children()
        if process.status() != psutil.STATUS_ZOMBIE
        and any("engines.environments.child" in part for part in process.cmdline())
    ]


def wait_for_end(pids: list[int]) -> bool:
    """Whether these processes end; one that nobody reaps counts."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if psutil.pid_exists(pid)]
        if all(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in alive):
            return True
        time.sleep(0.02)
    return False


# Contracts


def test_tools(play: Playing) -> None:
    environments = play("Counter")
    ready = environments.start()
    assert isinstance(ready, EnvironmentReady) and ready.digest.startswith("sha256:")
    schemas = {one["function"]["name"]: one["function"] for one in ready.tools}
    assert list(schemas) == ["add", "fail", "fill", "finish", "say"]
    assert schemas["add"] == {
        "name": "add",
        "description": "Add to the value.",
        "parameters": {
            "type": "object",
            "properties": {
                "number": {"type": "integer", "description": "how much, of the unit."},
                "unit": {
                    "type": "string",
                    "enum": ["one", "ten"],
                    "nullable": True,
                    "description": "what it counts.",
                },
            },
            "required": ["number"],
        },
    }
    [opening] = environments.opening([{"start": 2, "unused": "x"}], [7])
    assert opening == Outcome(observation="counting from 2 with seed 7")
    episode = begin(environments, start=2)
    two = episode.act(environments, "", [call("add", number=1), call("add", number=2, unit="ten")])
    assert two.results == ('{"value": 3}', '{"value": 23}')
    assert two.observation == '{"value": 3}\n{"value": 23}' and not two.done
    assert episode.act(environments, "", [call("say", text="é")]).observation == "é"
    assert episode.act(environments, "that is all") == Outcome(done=True)
    assert episode.finish(environments) == Outcome(reward=11.5)
    assert episode.finish(environments) == Outcome(reward=11.5), "a retried call gets it again"


FUNCTIONS = """
import asyncio

def add(one: int, other: int = 1) -> int:
    \"\"\"Add.\"\"\"
    return one + other

async def say(text: str) -> str:
    \"\"\"Say it.\"\"\"
    await asyncio.sleep(0)
    return text

def bare(text: str) -> str:
    return text
"""


def functions(tmp_path: Path, *names: str) -> Environments:
    (tmp_path / "my_tools.py").write_text(FUNCTIONS)
    (tmp_path / "more_tools.py").write_text(FUNCTIONS)
    paths = tuple(f"{tmp_path}/{name}" for name in names)
    return Environments(EpisodesConfig(environment=ToolsEnvironment(functions=paths), processes=1))


def test_functions_are_tools(tmp_path: Path) -> None:
    """As TRL's `tools`: the episode has ended once a turn calls none, and has no reward of its own."""
    with functions(tmp_path, "my_tools.py:add", "more_tools.py:say") as environments:
        ready = environments.start()
        assert [tool["function"]["name"] for tool in ready.tools] == ["add", "say"]
        assert ready.tools[0]["function"]["parameters"]["required"] == ["one"]
        episode = begin(environments)
        told = episode.act(environments, "", [call("add", one=2), call("say", text="é")])
        assert (told.results, told.done) == (("3", "é"), False)
        assert "Error: TypeError" in episode.act(environments, "", [call("add")]).observation
        assert "there are: add, say" in episode.act(environments, "", [call("drop")]).observation
        assert episode.act(environments, "that is all") == Outcome(done=True)
        assert episode.finish(environments) == Outcome()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("my_tools.py:bare",), "bare has no docstring"),
        (("my_tools.py:add", "more_tools.py:add"), "two of the tools add, add have one name"),
        (("my_tools.py:FUNCTIONS",), "FUNCTIONS"),
    ],
)
def test_functions_that_are_no_tools(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    with functions(tmp_path, *names) as environments, pytest.raises(ValueError, match=said):
        environments.start()


def test_a_tools_error_is_an_observation(play: Playing) -> None:
    environments = play("Counter")
    episode = begin(environments, start=0)
    calls = [
        call("fail"),
        call("subtract", number=1),
        call("reset", start=5),
        call("add"),
        {"name": "add", "arguments": "3"},
        call("say", text="\ud800"),
    ]
    outcome = episode.act(environments, "", calls)
    assert outcome.failed is None and not outcome.done
    tools = "add, fail, fill, finish, say"
    assert outcome.results == (
        "Error: KeyError: 'no such thing'",
        f"Error: there is no tool 'subtract'; there are: {tools}",
        f"Error: there is no tool 'reset'; there are: {tools}",
        "Error: TypeError: Counter.add() missing 1 required positional argument: 'number'",
        "Error: the arguments of add are no JSON object",
        "?",
    )


def test_an_episode_ends_by_the_environment_or_by_its_owner(play: Playing) -> None:
    environments = play("Counter")
    episode = begin(environments, "one", start=4)
    done = episode.act(environments, "", [call("finish")])
    assert (done.done, done.reward, done.results) == (True, None, ("null",))
    assert episode.finish(environments).reward == 2.0
    episode = begin(environments, "two", start=4)
    going_on = episode.act(environments, "", [call("add", number=2)])
    assert (going_on.done, going_on.results) == (False, ('{"value": 6}',))
    assert episode.finish(environments).reward == 3.0
    with play("Counter") as elsewhere:  # another worker plays it again first, to its end
        assert episode.finish(elsewhere).reward == 3.0


def test_text(play: Playing, tmp_path: Path) -> None:
    environments = play(f"{tmp_path}/my_envs.py:Texts")
    assert not environments.start().tools
    episode = begin(environments, name="you")
    assert episode.act(environments, "a").observation.startswith("2 a 0.")
    assert episode.act(environments, "quiet") == Outcome()
    assert episode.act(environments, "done") == Outcome(observation="bye", reward=0.5, done=True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "Undocumented",
            "tool has no docstring, and is a tool, as every public method is. Write what",
        ),
        ("Untyped", "the argument a of the tool tool has no type hint"),
        ("Idle", "Idle has neither tools, which are public methods, nor a method step"),
        ("Resetless", "Resetless has no method reset"),
        ("not_a_class", "is a int, no class or function"),
        ("nothing", "module 'my_envs' has no 'nothing'"),
        ("makes", "TypeError: .*missing 1 required positional argument: 'limit'"),
    ],
)
def test_what_is_no_environment_is_refused(play: Playing, name: str, said: str) -> None:
    with pytest.raises(
        ValueError, match=f"The environment my_envs:{name} cannot be loaded: .*{said}"
    ):
        play(name).start()


def test_what_it_gives_is_checked(play: Playing) -> None:
    environments = play("Texts")
    for text, said in {
        "nan": "gave the reward nan, which is no finite float32",
        "inf": "gave the reward -inf",
        "huge": "gave the reward 1e+39",
        "bool": "gave True (bool) as a reward, no number",
        "text": "gave '1.0' (str) as a reward, no number",
        "number": "gave 3 (int) as an observation, no text",
        "long": "gave an observation of 1048576 bytes; at most 65536 are allowed",
        "two": "step returned 2 values",
        "raise": "raised KeyError: 'no such thing' (my_envs.py:",
    }.items():
        outcome = begin(environments, text).act(environments, text)
        assert outcome.failed and said in outcome.failed.splitlines()[0], text
        assert outcome.reward is None and not outcome.observation
    assert begin(environments, "well").act(environments, "a").failed is None


def test_a_row_that_cannot_be_reset(play: Playing) -> None:
    environments = play("Texts", turn_timeout=4.0)  # the others must be within it on a busy machine
    rows: list[dict[str, Any]] = [{"raise": True}, {"name": "a"}, {"slow": True}, {"name": "b"}]
    raised, first, slow, second = environments.opening(rows, [0] * 4)
    assert raised.failed and "raised ValueError: no such row (my_envs.py:" in raised.failed
    assert slow.failed and "took longer than episodes.turn_timeout = 4 s" in slow.failed
    assert "my_envs.py" in slow.failed
    assert (first.failed, second.failed) == (None, None)


def test_a_row_with_numbers_that_are_not_finite_arrives_as_it_is(play: Playing) -> None:
    environments = play("Texts")
    row = {"name": [float("nan"), {"deep": float("-inf")}, float("inf"), None]}
    (opened,) = environments.opening([row], [0])
    assert opened.failed is None
    assert opened.observation.startswith("hello [nan, {'deep': -inf}, inf, None] ")


# Failures of the machinery


def test_a_hang_fails_its_episode_only(play: Playing) -> None:
    environments = play("Texts", turn_timeout=1.0)
    one, two = begin(environments, "one"), begin(environments, "two")
    one.act(environments, "a")
    two.act(environments, "a")
    turns = [one.next("hang"), two.next("b")]
    hung, other = environments.act(turns)
    assert hung.failed
    first, *stack = hung.failed.splitlines()
    assert first == "the environment took longer than episodes.turn_timeout = 1 s"
    assert hung.limit == TURN_SECONDS
    assert any("my_envs.py" in line and "in step" in line for line in stack)
    assert other.failed is None and other.observation.startswith("3 b ")


@pytest.mark.parametrize(
    ("text", "said"),
    [("exit", "exited with 3"), ("quit", "exited with 1"), ("kill", "was killed by SIGKILL")],
)
def test_a_crash_fails_its_episode_only(play: Playing, text: str, said: str) -> None:
    environments = play("Texts")
    one, two = begin(environments, "one"), begin(environments, "two")
    two.act(environments, "a")
    turns = [one.next(text), two.next("b")]
    crashed, other = environments.act(turns)
    assert crashed.failed and f"the environment failed: its process {said}" in crashed.failed
    assert other.failed is None and other.observation.startswith("3 b ")


def test_an_episodes_seconds_are_limited(play: Playing) -> None:
    environments = play("Texts", timeout=1.0)
    episode = begin(environments)
    outcomes = [episode.act(environments, "nap") for _ in range(3)]
    assert all((outcome.failed, outcome.limit) == (None, "") for outcome in outcomes)
    while outcomes[-1].limit == "" and len(outcomes) < 20:
        outcomes.append(episode.act(environments, "nap"))
    assert (outcomes[-1].failed, outcomes[-1].limit) == (None, SECONDS) and len(outcomes) < 8


def test_what_is_played_again_may_take_longer(play: Playing) -> None:
    """On a slower machine an episode that is over would reach its limit before its last turn."""
    environments = play("Texts", timeout=0.5)
    episode = begin(environments)
    for text in ("a", "nap", "nap", "nap", "nap"):
        episode.act(environments, text)
    environments.close()
    again = play("Texts", timeout=0.1).finish([episode.turn])
    assert again[0].failed is None


def test_an_episode_without_seconds_is_asked_for_its_reward(play: Playing) -> None:
    environments = play("Slow", timeout=0.5, turn_timeout=3.0)
    for name, seconds, end in (("one", 0.0, 0.25), ("two", 600.0, None)):
        episode = begin(environments, name, seconds=seconds)
        assert episode.act(environments, "0.6").limit == SECONDS
        last = episode.finish(environments)
        assert last.reward == end
        assert last.limit == (SECONDS if end else TURN_SECONDS)
        assert (last.failed is None) == bool(end)


def test_too_much_memory_fails_an_episode(play: Playing) -> None:
    environments = play("Counter", memory_gib=0.5)
    one, two = begin(environments, "one", start=0), begin(environments, "two", start=0)
    two.act(environments, "", [call("add", number=1)])
    filled = one.act(environments, "", [call("fill")])
    assert filled.failed and "has no memory left (episodes.memory_gib)" in filled.failed
    assert "in fill" in filled.failed
    assert two.act(environments, "", [call("add", number=1)]).results == ('{"value": 2}',)


def test_memory_that_others_took_fails_nobody(play: Playing) -> None:
    environments = play("Hoards", memory_gib=0.5)
    for number in range(4):
        episode = begin(environments, f"{number}")
        assert episode.act(environments, "200").observation == "kept"


def test_a_process_killed_between_turns_is_replaced(play: Playing, tmp_path: Path) -> None:
    log = tmp_path / "steps"
    environments = play("Texts", {"log": str(log)})
    episode = begin(environments, name="you")
    before = [episode.act(environments, text) for text in "ab"]
    [child] = children()
    child.kill()
    psutil.wait_procs([child], timeout=5)
    third = episode.act(environments, "c")
    assert third.failed is None and third.observation.startswith("4 c ")
    assert log.read_text().split() == ["a", "b", "a", "b", "c"]
    other = play("Texts")  # another worker, which has seen nothing of it
    again = replace(episode.turn, past=episode.turn.past[:2], text="c")
    assert other.act([again]) == [third]
    assert [before[0]] == other.act([replace(again, past=(), text="a")])


def test_a_retried_call_steps_once(play: Playing, tmp_path: Path) -> None:
    log = tmp_path / "steps"
    environments = play("Texts", {"log": str(log)}, processes=2)
    one, two = begin(environments, "one"), begin(environments, "two")
    turns = [one.next("a"), two.next("done")]
    first = environments.act(turns)
    assert environments.act(turns) == first
    one.answered(turns[0], first[0])
    assert one.act(environments, "b").observation.startswith("3 b ")
    assert sorted(log.read_text().split()) == ["a", "b", "done"]
    # From an earlier turn on another course: played again, not confused with what is there.
    other = environments.act([replace(turns[0], text="c")])
    assert other[0].observation.startswith("2 c ")


def test_more_episodes_than_are_held_are_played_again(play: Playing, tmp_path: Path) -> None:
    log = tmp_path / "steps"
    environments = play("Texts", {"log": str(log)}, sessions=2)
    episodes = [begin(environments, f"{number}") for number in range(3)]
    for text in "ab":
        outcomes = [episode.act(environments, text) for episode in episodes]
        assert all(outcome.failed is None for outcome in outcomes)
    assert log.read_text().split() == ["a", "a", "a", *["a", "b"] * 3]


def test_what_is_not_deterministic_is_found(play: Playing) -> None:
    environments = play("Texts")
    episode = begin(environments)
    episode.act(environments, "process")
    [child] = children()
    child.kill()
    psutil.wait_procs([child], timeout=5)
    failed = episode.act(environments, "a").failed
    assert failed and failed.startswith("the environment is not deterministic: ")
    assert "turn 1 was answered differently" in failed
    episode = begin(environments, "two")
    episode.turn = replace(episode.turn, opening=digest_of("something else"))
    failed = episode.act(environments, "a").failed
    assert failed and "its reset was answered differently" in failed


def test_sets_of_texts_have_the_same_order_everywhere(play: Playing) -> None:
    [first] = [begin(one).act(one, "set") for one in [play("Texts")]]
    [second] = [begin(one).act(one, "set") for one in [play("Texts")]]
    assert first == second and first.failed is None


def test_sessions_do_not_share_random_numbers(play: Playing) -> None:
    environments = play("Texts")
    alone = begin(environments, "alone", seed=1)
    expected = [alone.act(environments, "x").observation for _ in range(3)]
    one, two = begin(environments, "one", seed=1), begin(environments, "two", seed=2)
    mixed = []
    for _ in range(3):
        outcomes = environments.act([one.next("x"), two.next("x")])
        for episode, outcome in zip((one, two), outcomes, strict=True):
            episode.answered(episode.next("x"), outcome)
        mixed.append([outcome.observation for outcome in outcomes])
    assert [first for first, _ in mixed] == expected
    assert all(first != second for first, second in mixed)


def test_sessions_do_not_share_numpys_random_numbers(play: Playing) -> None:
    environments = play("Numbers")
    one, two = begin(environments, "one"), begin(environments, "two")
    for episode in (one, two):
        episode.act(environments)
    first = one.act(environments, "draw")
    two.act(environments, "seed")
    second = one.act(environments, "draw")
    assert first.failed is None and first != second
    other = play("Numbers")  # plays it again, alone
    assert other.act([replace(one.turn, past=one.turn.past[:2], text="draw")]) == [second]


# Interpreters and processes


def test_another_interpreter(play: Playing, tmp_path: Path) -> None:
    """A bare one: none of our dependencies is there, and none of ours is found."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True
    )
    file = tmp_path / "bare.py"
    file.write_text(
        "import sys\n"
        "class Bare:\n"
        "    def reset(self): return sys.prefix\n"
        "    def step(self, text):\n"
        "        try: import numpy\n"
        "        except ImportError: return 'no numpy', 1, True\n"
    )
    environments = play(f"{file}:Bare", python=str(tmp_path / "venv" / "bin" / "python"))
    [opening] = environments.opening([{}], [0])
    assert opening.observation == str(tmp_path / "venv")
    outcome = Episode("one", {}, 0, opening).act(environments, "a")
    assert outcome == Outcome(observation="no numpy", reward=1.0, done=True)


def test_processes_play_side_by_side(play: Playing) -> None:
    environments = play("Texts", processes=2)
    one, two = begin(environments, "one"), begin(environments, "two")
    outcomes = environments.act([one.next("process"), two.next("process")])
    assert len({outcome.observation for outcome in outcomes}) == 2


def test_closing_leaves_no_process(play: Playing) -> None:
    environments = play("Texts", processes=2)
    environments.start()
    pids = [child.pid for child in children()]
    assert len(pids) == 2
    environments.close()
    assert wait_for_end(pids)
    with pytest.raises(RuntimeError, match="environment my_envs:Texts has been closed"):
        environments.start()


def test_processes_die_with_their_worker(tmp_path: Path) -> None:
    program = (
        "from configs.episodes import ClassEnvironment, EpisodesConfig\n"
        "from engines.environments.sessions import Environments\n"
        "import os, signal\n"
        f"path = {str(tmp_path / 'my_envs.py')!r} + ':Texts'\n"
        "one = Environments(EpisodesConfig(environment=ClassEnvironment(path=path), processes=1))\n"
        "one.start()\n"
        "print('started', flush=True)\n"
        "signal.pause()\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "started\n"
        [child] = psutil.Process(worker.pid).children()
    finally:
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
    assert wait_for_end([child.pid])


# Libraries


def gymnasium(id: str, **settings: Any) -> Environments:
    environment = GymnasiumEnvironment(id=id, **settings)
    return Environments(EpisodesConfig(environment=environment, processes=1))


def test_a_library_that_is_missing_is_named(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True
    )
    config = EpisodesConfig(
        environment=GymnasiumEnvironment(id="FrozenLake-v1"),
        python=str(tmp_path / "venv" / "bin" / "python"),
    )
    with Environments(config) as environments, pytest.raises(ValueError) as raised:
        environments.start()
    assert "gymnasium is not installed" in str(raised.value)
    assert "`pip install gymnasium`" in str(raised.value)


def test_gymnasium() -> None:
    pytest.importorskip("gymnasium")
    with gymnasium("FrozenLake-v1", params={"is_slippery": False}) as environments:
        ready = environments.start()
        assert {"gymnasium", "numpy"} <= set(ready.packages) and not ready.tools
        [opening] = environments.opening([{}], [3])
        assert opening.observation == "0\nActions: 0 left, 1 down, 2 right, 3 up."
        episode = Episode("one", {}, 3, opening)
        none = episode.act(environments, "let me think")
        assert none.observation.startswith("That is no action: name one.") and not none.done
        path = ["I go down", "1", "Right", "<action>2</action>", "not left but down"]
        seen = [episode.act(environments, text) for text in path]
        assert [one.observation for one in seen] == ["4", "8", "9", "10", "14"]
        assert episode.act(environments, "right") == Outcome(
            observation="15", reward=1.0, done=True
        )


def test_the_lake_of_the_examples() -> None:
    pytest.importorskip("gymnasium")
    codec = Path(__file__).parents[3] / "examples/frozen_lake.py"
    lake = gymnasium("FrozenLake-v1", params={"is_slippery": False}, codec=f"{codec}:Ice")
    with lake as environments:
        [opening] = environments.opening([{}], [3])
        assert opening.observation == "0:"
        episode = Episode("one", {}, 3, opening)
        seen = [episode.act(environments, text) for text in ("m", "so a", "r", "a", "b")]
        assert [one.observation for one in seen] == ["4:", "8:", "9:", "13:", "14:"]
        assert episode.act(environments, "f") == Outcome(observation="15:", reward=1.0, done=True)


def test_gymnasium_rendered_as_text() -> None:
    pytest.importorskip("gymnasium")
    with gymnasium("FrozenLake-v1", params={"render_mode": "ansi"}) as environments:
        [opening] = environments.opening([{}], [3])
        assert "FHFH\nFFFH\nHFFG" in opening.observation


def test_gymnasium_with_a_codec(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    codec = tmp_path / "codec.py"
    codec.write_text(
        "import numpy as np\n"
        "class Codec:\n"
        "    def describe(self, observation, info): return f'{observation[2]:.3f}'\n"
        "    def action(self, text): return np.array([float(text)], dtype=np.float32)\n"
    )
    with (
        gymnasium("Pendulum-v1") as environments,
        pytest.raises(ValueError, match="which take a codec. Set episodes.environment.codec"),
    ):
        environments.start()
    with gymnasium("Pendulum-v1", codec=f"{codec}:Codec") as environments:
        [opening] = environments.opening([{}], [3])
        assert opening.observation == environments.opening([{}], [3])[0].observation
        episode = Episode("one", {}, 3, opening)
        assert "That is no action" in episode.act(environments, "much").observation
        stepped = episode.act(environments, "0.5")
        assert stepped.failed is None and stepped.reward is not None and stepped.reward < 0


def test_textarena() -> None:
    pytest.importorskip("textarena")
    environment = TextArenaEnvironment(id="GuessTheNumber-v0")
    with Environments(EpisodesConfig(environment=environment, processes=1)) as environments:
        assert environments.start().packages["textarena"]
        [opening] = environments.opening([{}], [3])
        assert "between 1 and 20" in opening.observation
        episode = Episode("one", {}, 3, opening)
        below, above = 0, 21
        for _ in range(5):
            guess = (below + above) // 2
            outcome = episode.act(environments, f"I say\n[{guess}]")
            if outcome.done:
                break
            # What is new, and not the model's own words again.
            assert outcome.observation.startswith("[GAME] The target number is ")
            if "higher" in outcome.observation:
                below = guess
            else:
                above = guess
        assert outcome.done and outcome.reward == 1.0


def test_a_process_that_somebody_kills_at_an_opening_opens_again(
    play: Playing, tmp_path: Path
) -> None:
    """Else the row would be dropped, and the run go on with another."""
    log = tmp_path / "resets"
    environments = play("Opens")
    with ThreadPoolExecutor(1) as threads:
        waited = threads.submit(environments.opening, [{"log": str(log)}], [7])
        while not log.exists() or not log.read_text():
            time.sleep(0.01)
        [process] = children()
        process.kill()
        [outcome] = waited.result(30)
    assert outcome.failed is None
    assert outcome.observation == "open"
    assert log.read_text().split() == ["reset", "reset"]


def test_a_process_that_somebody_kills_is_played_again(play: Playing, tmp_path: Path) -> None:
    """Its death is no fault of the episode: it is opened anew, and gets the same answers."""
    log = tmp_path / "steps"
    environments = play("Texts", {"log": str(log)})
    episode = begin(environments)
    first = episode.act(environments, "a")
    [process] = children()
    turn = episode.next("nap")
    with ThreadPoolExecutor(1) as threads:
        waited = threads.submit(environments.act, [turn])
        while "nap" not in log.read_text():
            time.sleep(0.01)
        process.kill()
        [outcome] = waited.result(30)
    assert outcome.failed is None
    episode.answered(turn, outcome)
    assert log.read_text().split() == ["a", "nap", "a", "nap"]
    assert first.failed is None
