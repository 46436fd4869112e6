"""Episodes of several players as stored samples: whose turn it is, who wrote what, who earns what."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from configs.data import DataConfig, FunctionSource
from configs.episodes import ClassEnvironment, EpisodesConfig
from configs.model import RandomModel
from engines.episodes.contract import AnswerRequest, EnvironmentSpec, OpponentSeats
from engines.episodes.environment_engine import EnvironmentEngine
from engines.rollout.contract import RolloutRequest, RolloutResult, Sampling
from engines.rollout.samples import Completion, read_begun, read_prompts, write_samples
from storage.batches.columns import UNFINISHED, Author, SampleStatus
from storage.batches.refs import BatchRef
from storage.objects.store import Store

P, E, T = Author.POLICY, Author.ENVIRONMENT, Author.TEMPLATE
GAMES = '''
class Pairs:
    """Both name a word; the second knows nothing of the first. Alike: 1 each, but for "end"."""

    def __init__(self, log="", consolation=None):
        self._log, self._consolation = log, consolation

    def reset(self, begins=0, **row):
        self._said = []
        return begins, ["you lead", "you follow"]

    def step(self, text, player):
        if self._log:
            with open(self._log, "a") as file:
                file.write(f"{player}:{text}\\n")
        if text == "crash":
            raise RuntimeError("the table fell over")
        if text == "end":
            return None, "", {player: -1.0}, True
        if text == "gift":
            return player, "and?", {1 - player: 0.5}, False
        self._said.append(text)
        if len(self._said) < 2:
            return 1 - player, "now"
        if text == "more":
            self._said.pop()
            return 1 - player, "he said more"
        alike = float(self._said[0] == self._said[1])
        return None, "", [alike, alike], True

    def get_reward(self):
        return self._consolation and [None, self._consolation]


def rows():
    return [{"question": f"q{n}", "begins": n % 2} for n in range(6)]
'''
Make = Callable[..., EnvironmentEngine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes an engine of the game above, with text in single characters."""
    (tmp_path / "games.py").write_text(GAMES)
    made = []

    def build(template: str = "plain", room: int = 60, **settings: Any) -> EnvironmentEngine:
        params = settings.pop("params", {})
        environment = ClassEnvironment(path=f"{tmp_path}/games.py:Pairs", params=params)
        data = {"template": template, **settings.pop("data", {})}
        made.append(
            EnvironmentEngine(
                EnvironmentSpec(
                    model=RandomModel(),
                    model_cache=str(tmp_path / "models"),
                    data=DataConfig(
                        source=FunctionSource(path=f"{tmp_path}/games.py:rows"), **data
                    ),
                    episodes=EpisodesConfig(
                        environment=environment, processes=1, players=2, **settings
                    ),
                    max_new_tokens=room,
                    store_uri=f"file://{tmp_path}/store",
                    store_options={},
                )
            )
        )
        return made[-1]

    yield build
    for engine in made:
        engine.close()


class Table:
    """The episodes of a shard; the test writes what the policy says, the samples are written as by
    the engines that sample."""

    def __init__(
        self,
        engine: EnvironmentEngine,
        folder: Path,
        rows: list[int],
        n: int,
        opponent: OpponentSeats | None = None,
    ) -> None:
        self.engine, self.store = engine, Store(f"file://{folder}/store")
        self.tokenizer, self.turn = engine._tokenizer, 0
        made = engine.prompts(rows, 5, "prompts.safetensors")
        assert made.ref is not None
        self.drawn = made.ref
        self.prompts, self.ref = engine.deal(made.ref, n, "dealt.safetensors", opponent)
        self.sampling = Sampling(n=n, max_new_tokens=60, max_turn_tokens=40)

    def column(self, name: str) -> list[Any]:
        found = self.ref.fetch_list(self.store, name)
        return [one.tolist() if isinstance(one, np.ndarray) else one for one in found]

    def text(self, name: str, ref: BatchRef | None = None) -> list[str]:
        ids = (ref or self.ref).fetch_list(self.store, name)
        return [self.tokenizer.decode(one) for one in ids]

    def says(self, texts: dict[int, str], cut: tuple[int, ...] = ()) -> Any:
        """The turns of the samples, by row, whose turn it is; `cut`: those that were too long."""
        self.writes(texts, cut)
        result = self.engine.answer(
            AnswerRequest(samples=self.ref, stage="rollout"), f"answer-{self.turn}.safetensors"
        )
        self.ref = result.ref
        return result

    def writes(
        self,
        texts: dict[int, str],
        cut: tuple[int, ...] = (),
        frozen: bool = False,
        version: int = 3,
        digest: str = "d",
    ) -> RolloutResult:
        """The same before the environment answers; `frozen`: by the opponent's engine."""
        self.turn += 1
        begun = read_begun(self.store, self.ref, len(self.ref), frozen)
        goes_on = [row for row, one in enumerate(begun) if one.finish_reason == UNFINISHED]
        assert goes_on == sorted(texts), "only those whose turn it is are sampled"
        for row, text in texts.items():
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            more = Completion(
                tokens=ids,
                logprobs=[-1.0] * len(ids),
                spans=[(version, 0, len(ids))],
                finish_reason="length" if row in cut else "stop",
            )
            begun[row] = begun[row].followed_by(more)
        request = RolloutRequest(
            prompts=self.prompts,
            sampling=self.sampling,
            out_key=f"turn-{self.turn}.safetensors",
            step=1,
            shard=1,
            begun=self.ref,
            frozen=frozen,
            worker="opponent-0" if frozen else "rollout-0",
        )
        prompts = read_prompts(self.store, self.prompts, 1000, self.sampling.n)
        written = write_samples(
            *(self.store, request, prompts, begun),
            engine="e",
            digests={version: digest},
            started=0.0,
            held=version,
        )
        self.ref = self.written = written.ref
        return written


def test_a_prompt_becomes_one_for_each_player(make: Make, tmp_path: Path) -> None:
    table = Table(make(), tmp_path, [0, 1], 2)
    assert len(table.drawn) == 2, "what is drawn is one row"
    assert table.text("prompt_ids", table.drawn) == ["q0\n\nyou lead", "q1\n\nyou follow"]
    asked = table.text("prompt_ids", table.prompts)
    assert asked == [
        *("q0\n\nyou lead", "q0\n\nyou follow\n\n"),
        *("q1\n\nyou lead\n\n", "q1\n\nyou follow"),
    ]
    assert table.prompts.fetch_list(table.store, "group_id") == [5, 5, 6, 6]
    assert table.prompts.fetch_list(table.store, "player") == [0, 1, 0, 1]
    assert table.column("finish_reason") == [
        *("unfinished", "unfinished", "waiting", "waiting"),
        *("waiting", "waiting", "unfinished", "unfinished"),
    ]


def test_turns_alternate_and_each_row_has_its_own(make: Make, tmp_path: Path) -> None:
    table = Table(make(), tmp_path, [0], 2)
    result = table.says({0: "a", 1: "b"})
    assert (result.unfinished, result.turns, result.failures) == (4, 2, ())
    assert table.column("sample_id") == [20, 21, 22, 23]
    assert table.column("episode_id") == [20, 21, 20, 21]
    assert table.text("response_ids") == ["a", "b", "now", "now"], "one who waits hears nothing"
    assert table.column("author")[2] == [E, E, E], "its first tokens are not the policy's"
    result = table.says({2: "a", 3: "more"})
    assert result.unfinished == 2
    assert table.column("episode") == ["done", "", "done", ""]
    assert table.text("response_ids") == ["a", "bhe said more", "nowa", "nowmore"]
    result = table.says({1: "more"})
    assert table.column("finish_reason")[:3] == ["done", "waiting", "stop"]
    table.says({3: "x"})
    assert table.column("episode") == ["done"] * 4
    assert table.column("status") == [SampleStatus.OK] * 4
    assert table.text("response_ids")[1::2] == ["bhe said moremore", "nowmorehe said morex"]
    assert table.column("author")[3] == [E] * 3 + [P] * 4 + [E] * 12 + [P]
    for authors, mask, logprobs, spans in zip(
        *map(table.column, ("author", "response_mask", "rollout_logprobs", "weight_spans")),
        strict=True,
    ):
        own = [who == P for who in authors]
        assert mask == own
        assert [one != 0 for one in logprobs] == own
        covered = np.zeros(len(own), bool)
        for start, stop in zip(spans[1::3], spans[2::3], strict=True):
            covered[start:stop] = True
        assert covered.tolist() == own
    assert table.column("turn_order") == [[0], [0, 2], [1], [1, 3]]
    assert table.column("turn_rewards")[0] == [1.0]
    assert table.column("turn_rewards")[2] == [1.0]
    assert np.nansum(table.column("turn_rewards")[3]) == 0.0
    assert table.column("turn_ids")[3] == [0] * 16 + [0] * 3 + [1]
    states = table.column("turn_states")
    assert states[0][0] == states[1][0] != states[2][0], "what one was told first"
    assert states[2][0] == states[3][0] != states[3][-1]
    assert table.engine.replay(table.ref) == []


def test_each_player_earns_its_own(make: Make, tmp_path: Path) -> None:
    table = Table(make(params={"consolation": 0.25}), tmp_path, [0], 2)
    table.says({0: "gift", 1: "end"})
    assert table.column("episode") == ["", "done"] * 2
    assert table.column("turn_rewards")[1::2] == [[-1.0], [0.25]], "the other had no turn"
    assert table.text("response_ids")[3] == ""
    assert table.column("turn_order")[3] == []
    table.says({0: "a"})
    table.says({2: "b"})
    assert table.column("turn_rewards")[2] == [0.75], "what came before its turn, and at the end"
    first = table.column("turn_rewards")[0]
    assert np.isnan(first[0]) and first[1:] == [0.0]
    assert table.engine.replay(table.ref) == []


def test_a_failure_is_that_of_all_players(make: Make, tmp_path: Path) -> None:
    table = Table(make(params={"consolation": 1.0}), tmp_path, [0], 2)
    table.says({0: "a", 1: "b"})
    result = table.says({2: "crash", 3: "b"})
    assert table.column("episode") == ["failed", "done"] * 2
    assert table.column("status")[::2] == [SampleStatus.FAILED] * 2
    assert all("the table fell over" in one for one in table.column("episode_error")[::2])
    assert [(one.sample, one.function) for one in result.failures] == [
        (20, "environment"),
        (22, "environment"),
    ]


def test_what_has_ended_stays_so_while_others_go_on(make: Make, tmp_path: Path) -> None:
    table = Table(make(), tmp_path, [0], 2)
    table.says({0: "crash", 1: "a"})
    table.says({3: "a"})
    failed = [table.written.fetch_list(table.store, "status")[row] for row in (0, 2)]
    assert failed == [SampleStatus.FAILED] * 2
    assert table.column("status")[::2] == [SampleStatus.FAILED] * 2


def test_a_limit_of_one_ends_it_for_all(make: Make, tmp_path: Path) -> None:
    table = Table(make(max_turns=2, params={"consolation": 2.0}), tmp_path, [0], 3)
    table.says({0: "x" * 40, 1: "b", 2: "c"}, cut=(0,))
    assert table.column("episode")[::3] == ["turn_tokens"] * 2
    assert table.column("status")[::3] == [SampleStatus.TRUNCATED, SampleStatus.OK]
    assert table.column("turn_rewards")[::3] == [[], [2.0]], "none for who was not given any"
    table.says({4: "more", 5: "y" * 40})
    assert table.column("episode")[2::3] == ["done"] * 2
    table.says({1: "more"})
    table.says({4: "more"})
    assert table.column("episode")[1::3] == ["turns"] * 2, "a third turn of player 0"
    assert table.column("status")[1::3] == [SampleStatus.OK] * 2


def test_an_answer_that_does_not_fit_ends_it_for_all(make: Make, tmp_path: Path) -> None:
    table = Table(make(room=20), tmp_path, [0], 1)
    table.says({0: "b" * 9})
    table.says({1: "more"})
    assert table.column("episode") == ["tokens"] * 2
    assert table.column("status") == [SampleStatus.TRUNCATED, SampleStatus.OK]


def test_the_process_is_killed_in_mid_episode(make: Make, tmp_path: Path) -> None:
    """The turns of both players, in their order, are played again, and what they heard compared."""
    log = tmp_path / "log"
    table = Table(make(params={"log": str(log)}), tmp_path, [0], 1)
    for turn in ({0: "a"}, {1: "more"}, {0: "more"}):
        table.says(turn)
    log.unlink()
    [process] = [
        one
        for one in psutil.Process().children()
        if any("engines.environments.child" in part for part in one.cmdline())
    ]
    process.kill()
    result = table.says({1: "a"})
    assert result.failures == ()
    assert log.read_text().splitlines() == ["0:a", "1:more", "0:more", "1:a"]
    assert table.column("turn_rewards") == [[pytest.approx(np.nan, nan_ok=True), 1.0]] * 2
    (tmp_path / "games.py").write_text(GAMES.replace("he said more", "she said more"))
    table.engine.close()
    again = make()
    differing = again.replay(table.ref)
    assert [sample for sample, _ in differing] == [10, 11]
    assert all("not deterministic" in error for _, error in differing)


def test_a_first_turn_goes_on_in_the_prompts_message(make: Make, tmp_path: Path) -> None:
    """Under a chat template: the prompt and what is told later are one message of a user."""
    table = Table(make(template="chat", room=400), tmp_path, [0], 1)
    leads, follows = table.text("prompt_ids", table.prompts)
    assert leads.endswith("q0\n\nyou lead\nassistant: ")
    assert follows.endswith("q0\n\nyou follow\n\n")
    table.says({0: "a"})
    assert table.text("response_ids")[1] == "now\nassistant: "
    assert table.column("author")[1] == [E] * 3 + [T] * len("\nassistant: ")


def test_a_prompt_of_any_player_that_is_too_long_is_dropped(make: Make, tmp_path: Path) -> None:
    engine = make(data={"max_prompt_tokens": 13})
    made = engine.prompts([0, 1], 5, "prompts.safetensors")
    assert made.ref is None
    assert made.dropped == ((0, "prompt_too_long"), (1, "prompt_too_long"))


def test_samples_of_an_unsampled_shard_are_none(make: Make, tmp_path: Path) -> None:
    """Before its first turn a sample has no tokens, so a later step begins it anew."""
    table = Table(make(), tmp_path, [0], 2)
    assert table.ref.lengths(table.store, "response_ids").tolist() == [0] * 4
    again = dataclasses.replace(table.sampling, n=1)
    assert len(table.engine.deal(table.drawn, again.n, "again.safetensors")[1]) == 2


@pytest.mark.parametrize(
    ("plays", "frozen"),
    [("in_turn", [[0, 1, 1], [1, 0, 1], [1, 1, 0], [0, 1, 1]]), (2, [[1, 1, 0]] * 4)],
)
def test_the_opponent_has_all_seats_but_one(plays: Any, frozen: list[list[int]]) -> None:
    opponent = OpponentSeats(digest="f", policy_plays=plays)
    assert opponent.seats(np.array([3, 4, 5, 6]), 3).astype(int).tolist() == frozen


def test_an_opponent_has_turns_of_its_own(make: Make, tmp_path: Path) -> None:
    """Group 5: the policy is player 1, and the opponent begins; group 6: the policy is player 0,
    and the opponent begins too. The policy's step has the number of the opponent's version."""
    opponent = OpponentSeats(digest="f", policy_plays="in_turn")
    table = Table(make(), tmp_path, [0, 1], 1, opponent)
    assert table.prompts.fetch_list(table.store, "frozen") == [1, 0, 0, 1]
    theirs = "opponent's turn"
    assert table.column("finish_reason") == [theirs, "waiting", "waiting", theirs]
    written = table.writes({0: "a", 3: "b"}, frozen=True, version=7, digest="f")
    assert (written.stats.version, written.stats.digest, written.stats.tokens) == (7, "f", 2)
    result = table.engine.answer(
        AnswerRequest(samples=table.ref, stage="rollout"), "answer-first.safetensors"
    )
    table.ref = result.ref
    assert (result.unfinished, result.opponents, result.turns) == (4, 0, 2)
    assert table.column("finish_reason") == ["waiting", "unfinished", "unfinished", "waiting"]
    written = table.writes({1: "more", 2: "b"}, version=7, digest="d")
    assert (written.stats.version, written.stats.digest, written.stats.oldest) == (7, "d", 7)
    result = table.engine.answer(
        AnswerRequest(samples=table.ref, stage="rollout"), "answer-second.safetensors"
    )
    table.ref = result.ref
    assert (result.unfinished, result.opponents) == (2, 1)
    assert table.column("finish_reason")[:2] == [theirs, "waiting"]
    assert table.column("weights_digest") == ["f", "d", "d", "f"], "of each row's own"
    assert table.column("worker") == ["opponent-0", "rollout-0", "rollout-0", "opponent-0"]
    assert table.column("frozen") == [1, 0, 0, 1]
    table.writes({0: "more"}, frozen=True, version=7, digest="f")
    result = table.engine.answer(
        AnswerRequest(samples=table.ref, stage="rollout"), "answer-third.safetensors"
    )
    table.ref = result.ref
    written = table.writes({1: "x"}, version=9, digest="e")
    assert (written.stats.oldest, written.stats.version) == (7, 9), "of the policy's"
    result = table.engine.answer(
        AnswerRequest(samples=table.ref, stage="rollout"), "answer-fourth.safetensors"
    )
    table.ref = result.ref
    assert result.unfinished == 0
    assert table.column("weights_digest") == ["f", "e", "d", "f"]
    assert table.column("weight_spans")[0][::3] == [7, 7]
    kept = table.ref.of_policy(table.store)
    assert kept.fetch_list(table.store, "player") == [1, 0]
    assert table.engine.replay(table.ref) == []


def test_what_the_policy_has_begun_is_nothing_to_the_opponent(make: Make, tmp_path: Path) -> None:
    """A turn of the policy that was cut stays as it is while the opponent has its own."""
    table = Table(make(), tmp_path, [0], 2, OpponentSeats(digest="f", policy_plays=0))
    table.says({0: "a", 1: "more"})
    table.writes({2: "more", 3: "b"}, frozen=True, version=0, digest="f")
    result = table.engine.answer(
        AnswerRequest(samples=table.ref, stage="rollout"), "answer-first.safetensors"
    )
    table.ref = result.ref
    assert table.column("finish_reason")[:2] == ["unfinished", "done"]
    begun = read_begun(table.store, table.ref, 4, frozen=True)
    assert [one.ended for one in begun] == [True] * 4
    begun = read_begun(table.store, table.ref, 4)
    assert [one.ended for one in begun] == [False, True, True, True]
