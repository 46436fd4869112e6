"""Episodes as stored samples: what the environments' answers add to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.data import DataConfig, FunctionSource
from configs.episodes import ClassEnvironment, EpisodesConfig
from configs.model import RandomModel
from engines.episodes.contract import AnswerRequest, EnvironmentFailed, EnvironmentSpec
from engines.episodes.environment_engine import EnvironmentEngine
from storage.batches.columns import Author, SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store

P, E, T = Author.POLICY, Author.ENVIRONMENT, Author.TEMPLATE
GAMES = '''
import time


class Echo:
    """Says what it was told, and counts."""

    def __init__(self, reward=None):
        self._reward = reward

    def reset(self, seed=0, fail=False, **row):
        if fail:
            raise RuntimeError("no table is free")
        self.turns, self.done = 0, False
        return "hello"

    def step(self, text):
        self.turns += 1
        if text == "crash":
            raise RuntimeError("the table fell over")
        if text == "hush":
            return ""
        self.done = text == "bye"
        return (f"[{text}]", 0.5, self.done)

    def get_reward(self):
        return self._reward


class Slow(Echo):
    """Has its time."""

    def __init__(self, reward=None, names=()):
        super().__init__(reward)
        self.names = names

    def step(self, text):
        time.sleep(600 if text == "hang" else 2.1 if text == "wait" else 0)
        return super().step(self.names[0] if text == "name" else text)


class Adder:
    """With a tool."""

    def reset(self, **row):
        self.total = 0

    def add(self, number: int) -> int:
        """Add.

        Args:
            number: how much.
        """
        self.total += number
        return self.total

    def get_reward(self):
        return float(self.total)


def rows():
    return [{"question": f"q{n}", "fail": n == 3} for n in range(6)]
'''
Make = Callable[..., EnvironmentEngine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes an engine of a class of the file above, with plain text in single characters."""
    (tmp_path / "games.py").write_text(GAMES)
    made = []

    def build(
        name: str = "Echo", template: str = "plain", most: int = 60, **settings: Any
    ) -> EnvironmentEngine:
        params = settings.pop("params", {})
        environment = ClassEnvironment(path=f"{tmp_path}/games.py:{name}", params=params)
        made.append(
            EnvironmentEngine(
                EnvironmentSpec(
                    model=RandomModel(),
                    model_cache=str(tmp_path / "models"),
                    data=DataConfig(
                        source=FunctionSource(path=f"{tmp_path}/games.py:rows"), template=template
                    ),
                    episodes=EpisodesConfig(environment=environment, processes=1, **settings),
                    max_new_tokens=most,
                    store_uri=f"file://{tmp_path}/store",
                    store_options={},
                )
            )
        )
        return made[-1]

    yield build
    for engine in made:
        engine.close()


class Play:
    """Episodes of one group, whose turns of the policy are written by the test."""

    def __init__(self, engine: EnvironmentEngine, folder: Path, count: int, row: int = 1) -> None:
        self.engine, self.store, self.count = engine, Store(f"file://{folder}/store"), count
        self.tokenizer = engine._tokenizer
        made = engine.prompts([row], 7, "prompts.safetensors")
        assert made.ref is not None
        self.prompts = made.ref
        self.ref: BatchRef | None = None
        self.turn = 0

    def column(self, name: str) -> list[Any]:
        assert self.ref is not None
        found = self.ref.fetch_list(self.store, name)
        return [one.tolist() if isinstance(one, np.ndarray) else one for one in found]

    def says(self, *texts: str | None, cut: bool = False, sampled_seconds: float = 0.0) -> Any:
        """Each episode's next turn (None: it is over), and the environments' answers."""
        self.turn += 1
        before = [[] for _ in texts] if self.ref is None else self.column("response_ids")
        authors = [[] for _ in texts] if self.ref is None else self.column("author")
        logprobs = [[] for _ in texts] if self.ref is None else self.column("rollout_logprobs")
        new = [self.tokenizer(text or "", add_special_tokens=False)["input_ids"] for text in texts]
        finish = ["length" if cut else "stop"] * len(texts)
        status = np.full(len(texts), SampleStatus.TRUNCATED if cut else SampleStatus.OK, np.int64)
        columns: dict[str, object] = {
            "response_ids": [np.array(a + b, np.int32) for a, b in zip(before, new, strict=True)],
            "rollout_logprobs": [
                np.array(a + [-1.0] * len(b), np.float32)
                for a, b in zip(logprobs, new, strict=True)
            ],
            "finish_reason": finish,
            "status": status,
            "sample_id": np.arange(len(texts)) + 70,
        }
        if self.ref is not None:
            columns["author"] = [
                np.array(a + [P] * len(b), np.uint8) for a, b in zip(authors, new, strict=True)
            ]
        written = write_batch(self.store, f"turn-{self.turn}.safetensors", columns)
        ref = self.prompts.take(np.zeros(len(texts), np.int64)).with_columns(written)
        if self.ref is not None:
            kept = [name for name in self.ref.names if name not in ref.names]
            ref = ref.with_columns(self.ref[kept])
        key = f"answer-{self.turn}.safetensors"
        result = self.engine.answer(
            AnswerRequest(samples=ref, sampled_seconds=sampled_seconds), key
        )
        self.ref = result.ref
        return result


def test_what_the_environment_says_first_is_in_the_prompt(make: Make, tmp_path: Path) -> None:
    engine = make()
    made = engine.prompts([0, 3, 1], 5, "prompts.safetensors")
    assert made.dropped == ((3, "environment_failed"),)
    store = Store(f"file://{tmp_path}/store")
    texts = [engine._tokenizer.decode(ids) for ids in made.ref.fetch_list(store, "prompt_ids")]
    assert texts == ["q0\n\nhello", "q1\n\nhello"]
    assert made.ref.fetch_numpy(store, "group_id")[0].tolist() == [5, 6]
    seeds = made.ref.fetch_numpy(store, "env_seed")[0].tolist()
    assert len(set(seeds)) == 2 and all(0 <= seed < 2**31 for seed in seeds)
    with pytest.raises(EnvironmentFailed, match="no table is free"):
        engine.prompts([3], 5, "none.safetensors")


@pytest.mark.parametrize("reward", [None, 0.25])
def test_limits_of_seconds_have_names_of_their_own(
    make: Make, tmp_path: Path, reward: float | None
) -> None:
    """What was given on the way is no reward of an episode that was cut off for being slow."""
    params = {} if reward is None else {"reward": reward}
    engine = make("Slow", timeout=2.0, turn_timeout=5.0, params=params)
    play = Play(engine, tmp_path, 3)
    result = play.says("wait", "a", "b")
    assert play.column("episode") == ["seconds", "", ""]
    status = SampleStatus.FAILED if reward is None else SampleStatus.OK
    assert play.column("status")[0] == status
    said = "the environment took longer than episodes.timeout = 2 s"
    if reward is None:
        assert play.column("episode_error")[0] == f"{said}, and gave no reward at its end"
        assert [one.sample for one in result.failures] == [70]
    else:
        assert play.column("episode_error")[0] == "" and result.failures == ()
        assert play.column("turn_rewards")[0] == [0.75]
    play.says(None, "b", "bye")
    assert play.column("episode") == ["seconds", "", "done"], "each has seconds of its own"


@pytest.mark.parametrize("reward", [None, 0.25])
def test_an_episode_has_a_deadline_of_its_own(
    make: Make, tmp_path: Path, reward: float | None
) -> None:
    """Sampling counts too; what was not over by then ends with the answer that took it beyond."""
    params = {} if reward is None else {"reward": reward}
    play = Play(make("Slow", deadline=9.0, params=params), tmp_path, 2)
    play.says("a", "a", sampled_seconds=3.0)
    assert play.column("episode") == ["", ""]
    result = play.says("wait", "bye", sampled_seconds=7.0)
    assert play.column("episode") == ["deadline", "done"]
    if reward is None:
        said = (
            "the environment played until episodes.deadline = 9.0 s, and gave no reward at its end"
        )
        assert play.column("episode_error") == [said, ""]
        assert play.column("status")[0] == SampleStatus.FAILED
        assert [one.sample for one in result.failures] == [70]
    else:
        assert play.column("status")[0] == SampleStatus.OK
        assert play.column("episode_error") == ["", ""]


def test_samples_that_lie_apart_are_gathered(make: Make, tmp_path: Path) -> None:
    """In the order of the prompts, those that were not begun among them, as empty ones."""
    engine = make()
    play = Play(engine, tmp_path, 2)
    play.says("a", "bye")
    assert play.ref is not None
    parts = [play.ref.rows(1, 2), None, play.ref.rows(0, 1)]
    ref = engine.gather(play.prompts, 3, parts, "gathered.safetensors")
    whole = ref.fetch(play.store)
    assert list(ref.fetch_list(play.store, "prompt_row")) == [1, 1, 1]
    assert ref[["response_ids"]].objects == {"gathered.safetensors"}
    assert whole["sample_id"].tolist() == [71, 7 * 3 + 1, 70], "numbers of samples stay"
    assert whole["status"].tolist() == [SampleStatus.OK, *[SampleStatus.UNFINISHED] * 2]
    assert ref.fetch_list(play.store, "finish_reason") == ["stop", "unfinished", "unfinished"]
    assert ref.fetch_list(play.store, "episode") == ["done", "", ""]
    assert ref.lengths(play.store, "response_ids")[1] == 0
    for name in play.ref.names:
        both = zip(ref.fetch_list(play.store, name)[::2], play.column(name)[::-1], strict=True)
        for after, before in both:
            np.testing.assert_array_equal(after, before, err_msg=name)


def test_a_turn_without_an_answer_has_failed(make: Make, tmp_path: Path) -> None:
    play = Play(make("Slow", turn_timeout=1.0, params={"reward": 0.25}), tmp_path, 1)
    play.says("a")
    play.says("hang")
    assert play.column("episode") == ["turn_seconds"]
    assert play.column("status") == [SampleStatus.FAILED]
    assert "episodes.turn_timeout = 1 s" in play.column("episode_error")[0]


def test_params_may_be_lists(make: Make, tmp_path: Path) -> None:
    play = Play(make("Slow", params={"names": ["ada", "bob"]}), tmp_path, 1)
    play.says("name")
    assert play.tokenizer.decode(play.column("response_ids")[0]) == "name[ada]"


def test_turns_and_their_ends(make: Make, tmp_path: Path) -> None:
    play = Play(make(max_turns=3), tmp_path, 3)
    result = play.says("ab", "bye", "crash")
    assert (result.unfinished, result.turns) == (1, 3)
    assert play.column("episode") == ["", "done", "failed"]
    assert play.column("status") == [
        SampleStatus.UNFINISHED,
        SampleStatus.OK,
        SampleStatus.FAILED,
    ]
    assert play.column("finish_reason")[0] == "unfinished"
    assert "the table fell over" in play.column("episode_error")[2]
    assert [(one.sample, one.function) for one in result.failures] == [(72, "environment")]
    assert play.column("author")[0] == [P, P, E, E, E, E]
    assert play.tokenizer.decode(play.column("response_ids")[0]) == "ab[ab]"
    assert play.column("rollout_logprobs")[0] == [-1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    assert play.column("response_mask")[0] == [1, 1, 0, 0, 0, 0]
    assert play.says("c", None, None).turns == 1
    result = play.says("d", None, None)
    assert (result.unfinished, play.column("episode")[0]) == (0, "turns")
    assert play.column("turn_rewards") == [[0.5, 0.5, 0.5], [0.5], []]
    assert play.column("turn_ids")[0] == [0] * 6 + [1] * 4 + [2]
    states = play.column("turn_states")[0]
    assert len(set(states)) == 3 and states[:6] == [states[0]] * 6
    assert play.tokenizer.decode(play.column("response_ids")[0]) == "ab[ab]c[c]d"
    assert play.engine.replay(play.ref) == []


def test_turns_between_which_nothing_is_said_stay_apart(make: Make, tmp_path: Path) -> None:
    play = Play(make(), tmp_path, 1)
    play.says("hush")
    play.says("c")
    assert play.tokenizer.decode(play.column("response_ids")[0]) == "hush\nc[c]"
    assert play.column("author")[0] == [P] * 4 + [E] + [P] + [E] * 3
    assert play.engine.replay(play.ref) == []


def test_limits_of_tokens(make: Make, tmp_path: Path) -> None:
    play = Play(make(params={"reward": 2.0}), tmp_path, 2)
    play.says("x" * 40, "y")
    assert play.column("episode") == ["tokens", ""], "the answer does not fit"
    assert play.column("turn_rewards")[0] == [2.5], "what its end is worth is asked all the same"
    assert play.column("status")[0] == SampleStatus.TRUNCATED
    result = play.says(None, "z", cut=True)
    assert (result.unfinished, play.column("episode")[1]) == (0, "turn_tokens")
    assert play.column("turn_rewards")[1] == [2.5]


def test_tools(make: Make, tmp_path: Path) -> None:
    play = Play(make("Adder", template="chat", most=1000), tmp_path, 4)
    asked = play.tokenizer.decode(play.prompts.fetch_list(play.store, "prompt_ids")[0])
    assert '"name": "add"' in asked
    call = '<tool_call>{"name": "add", "arguments": {"number": %s}}</tool_call>'
    play.says(call % 3, call % '"x"', "<tool_call>{add}</tool_call>", "nothing to add")
    assert play.column("episode") == ["", "", "", "done"]
    told = [play.tokenizer.decode(ids) for ids in play.column("response_ids")]
    assert told[0].endswith("</tool_call>\nuser: 3\nassistant: ")
    assert "Error: TypeError" in told[1]
    assert "Error: The call is not valid JSON" in told[2]
    play.says("done", "done", call % 4, None)
    assert play.column("turn_rewards")[0][-1:] == [3.0]
    play.says(None, None, "done", None)
    assert play.column("turn_rewards")[2][-1:] == [4.0], (
        "the environment never saw what was no call"
    )
    assert play.engine.replay(play.ref) == []


def test_an_environment_that_says_something_else_is_found(make: Make, tmp_path: Path) -> None:
    play = Play(make(), tmp_path, 1)
    play.says("bye")
    (tmp_path / "games.py").write_text(GAMES.replace("[{text}]", "<{text}>"))
    play.engine.close()
    again = make()
    [(sample, error)] = again.replay(play.ref)
    assert sample == 70
    assert "not deterministic" in error
