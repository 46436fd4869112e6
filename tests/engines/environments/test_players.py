"""Environments of several players, in a process: who is next, what each is told, what each earns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from configs.episodes import ClassEnvironment, EpisodesConfig, TextArenaEnvironment
from engines.environments.protocol import Outcome, PlayersTurn
from engines.environments.sessions import Environments
from tests.engines.environments.playing import Episode, begin

GAMES = '''
import os, random


class Auction:
    """Each bids once in a round; the higher bid takes the round."""

    def __init__(self, log=""):
        self._log = log

    def reset(self, seed, players, begins=0, **row):
        self._random, self._bids, self._players = random.Random(seed), {}, players
        self._secrets = [self._random.randrange(100) for _ in range(players)]
        return begins, [f"you have {secret}" for secret in self._secrets]

    def step(self, text, player):
        if self._log:
            with open(self._log, "a") as file:
                file.write(f"{player}:{text}\\n")
        if text == "die":
            os._exit(3)
        if text == "raise":
            raise RuntimeError("no hammer")
        if text == "none":
            return None
        if text == "who":
            return 2, "nobody"
        if text == "true":
            return True, "nobody"
        if text == "one":
            return 0, "", 1.0, False
        if text == "many":
            return 0, "", [1.0, 0.0, 0.0], False
        if text == "stranger":
            return 0, "", {5: 1.0}, False
        if text == "nan":
            return 0, "", [float("nan"), 0.0], False
        if text == "number":
            return 0, 3
        if text == "again":
            return player, "say that again"
        self._bids[player] = int(text)
        if len(self._bids) == self._players:
            best = max(self._bids, key=self._bids.get)
            return None, None, {best: 1.0 - self._bids[best] / 100}, True
        following = (player + 1) % self._players
        return following, f"{self._random.randrange(10)} people look at you"

    def get_reward(self):
        return [0.25, None][: self._players]


class Silent:
    def reset(self):
        return ["", ""]

    def step(self, text, player):
        return 1 - player, None


class Short(Silent):
    def reset(self):
        return ["for one"]


class Worded(Silent):
    def reset(self):
        return "all the same"


class Alone:
    def reset(self):
        return ""

    def step(self, text):
        return ""


class Tool:
    def reset(self):
        return ["", ""]

    def bid(self, price: int) -> str:
        """Bid.

        Args:
            price: how much.
        """
        return "no"
'''
Playing = Callable[..., Environments]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Playing]:
    """Makes environments of a class of the file above."""
    (tmp_path / "games.py").write_text(GAMES)
    made = []

    def build(name: str, params: dict[str, Any] | None = None, players: int = 2) -> Environments:
        environment = ClassEnvironment(path=f"{tmp_path}/games.py:{name}", params=params or {})
        settings = EpisodesConfig(environment=environment, processes=1, players=players)
        made.append(Environments(settings))
        return made[-1]

    yield build
    for one in made:
        one.close()


def test_turns_of_two_players(play: Playing) -> None:
    environments = play("Auction")
    [opening] = environments.opening([{}], [7])
    told = PlayersTurn.of(opening.observation)
    assert told.player == 0
    assert [text.partition(" have ")[0] for text in told.texts] == ["you", "you"]
    assert told.texts[0] != told.texts[1], "each has a secret of its own"
    episode = Episode("one", {}, 7, opening)
    again = episode.act(environments, "again")
    assert PlayersTurn.of(again.observation) == PlayersTurn(player=0, texts=("say that again",))
    bid = episode.act(environments, "10")
    assert PlayersTurn.of(bid.observation).player == 1
    assert bid.rewards == ()
    done = episode.act(environments, "30")
    assert done == Outcome(done=True, rewards=(None, 0.7))
    assert episode.finish(environments) == Outcome(rewards=(0.25, None))


def test_the_environment_says_who_begins(play: Playing) -> None:
    [opening] = play("Auction", players=3).opening([{"begins": 2}], [7])
    told = PlayersTurn.of(opening.observation)
    assert (told.player, len(told.texts)) == (2, 3)


def test_what_it_gives_is_checked(play: Playing) -> None:
    environments = play("Auction")
    for text, said in {
        "none": "step returned None; for several players it returns who is next and what that one",
        "who": "gave 2 (int) as the player who is next; they are 0 to 1",
        "true": "gave True (bool) as the player who is next",
        "one": "gave 1.0 (float) as rewards; they are a list of 2, or a dict",
        "many": "gave [1.0, 0.0, 0.0] (list) as rewards",
        "stranger": "gave {5: 1.0} (dict) as rewards",
        "nan": "gave the reward nan",
        "number": "gave 3 (int) as an observation, no text",
        "raise": "raised RuntimeError: no hammer",
    }.items():
        outcome = begin(environments, text).act(environments, text)
        assert outcome.failed and said in outcome.failed.splitlines()[0], text
        assert outcome.rewards == () and not outcome.observation
    for name in ("Short", "Worded"):
        [opening] = play(name).opening([{}], [1])
        assert opening.failed and "for 2 players it returns a list of what each is told" in (
            opening.failed
        )
    silent = begin(play("Silent"))
    assert PlayersTurn.of(silent.act(play("Silent"), "a").observation) == PlayersTurn(
        player=1, texts=("",)
    )


@pytest.mark.parametrize(
    ("name", "players", "said"),
    [
        ("Alone", 2, r"Alone has no method step\(text, player\), which episodes.players = 2 takes"),
        ("Tool", 2, r"Tool has no method step\(text, player\), which episodes.players = 2 takes"),
        ("Silent", 1, r"step of Silent does not take \(text\) alone. .* set episodes.players"),
    ],
)
def test_a_class_for_another_number_of_players_is_refused(
    play: Playing, name: str, players: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        play(name, players=players).start()


def test_a_process_that_dies_is_replaced_with_the_turns_of_all_players(
    play: Playing, tmp_path: Path
) -> None:
    log = tmp_path / "steps"
    environments = play("Auction", {"log": str(log)})
    episode = begin(environments)
    first = episode.act(environments, "again")
    second = episode.act(environments, "10")
    retried = begin(environments, "two")
    with play("Auction", {"log": str(log)}) as elsewhere:  # a worker that has seen nothing of it
        done = episode.act(elsewhere, "30")
        assert done.rewards == (None, 0.7)
    assert log.read_text().splitlines() == [
        *("0:again", "0:10"),
        *("0:again", "0:10", "1:30"),
    ]
    assert first.failed is None and second.failed is None
    turn = retried.next("20")
    assert environments.act([turn]) == environments.act([turn])
    assert log.read_text().splitlines().count("0:20") == 1, "a call that is retried steps once"
    failed = begin(environments, "three").act(environments, "die")
    assert failed.failed and failed.died
    assert log.read_text().splitlines().count("0:die") == 2


@pytest.mark.parametrize(
    "environment",
    [
        {"kind": "gymnasium", "id": "FrozenLake-v1"},
        {"kind": "openenv", "url": "http://localhost:8000"},
        {"kind": "agent", "path": "agents:ask"},
    ],
)
def test_kinds_of_one_player_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(
        ValidationError,
        match=f"episodes.players = 2 takes an environment with turns of several players, and "
        f"episodes.environment.kind = {environment['kind']} has one. Set",
    ):
        EpisodesConfig.model_validate({"environment": environment, "players": 2})


def textarena(id: str, players: int = 2) -> Environments:
    environment = TextArenaEnvironment(id=id)
    return Environments(EpisodesConfig(environment=environment, processes=1, players=players))


def test_textarena_tic_tac_toe() -> None:
    pytest.importorskip("textarena")
    with textarena("TicTacToe-v0") as environments:
        [opening] = environments.opening([{}], [3])
        told = PlayersTurn.of(opening.observation)
        assert told.player == 0
        assert "You are Player 0 in Tic Tac Toe" in told.texts[0]
        assert told.texts[1] == "", "it is told at its first turn"
        episode = Episode("one", {}, 3, opening)
        second = PlayersTurn.of(episode.act(environments, "[4]").observation)
        assert second.player == 1
        assert "You are Player 1 in Tic Tac Toe" in second.texts[0]
        assert "[Player 0] [4]" in second.texts[0]
        occupied = PlayersTurn.of(episode.act(environments, "[4]").observation)
        assert occupied.player == 1, "who made no move is asked again"
        assert occupied.texts[0].startswith("[GAME] Player 1 attempted an invalid move")
        third = PlayersTurn.of(episode.act(environments, "[0]").observation)
        assert third.player == 0
        assert "You are Player" not in third.texts[0], "what is new"
        assert "[Player 1] [0]" in third.texts[0]
        for text in ("[1]", "[2]"):
            going_on = episode.act(environments, text)
            assert not going_on.done
        done = episode.act(environments, "[7]")
        assert (done.done, done.rewards) == (True, (1.0, -1.0))
    with (
        textarena("TicTacToe-v0", players=3) as three,
        pytest.raises(ValueError, match="The number of players has to be 2, received 3"),
    ):
        three.start()


def test_textarena_kuhn_poker() -> None:
    pytest.importorskip("textarena")
    with textarena("KuhnPoker-v0") as environments:
        [opening] = environments.opening([{}], [3])
        assert PlayersTurn.of(opening.observation).player == 1, "the seed decides who begins"
        episode = Episode("one", {}, 3, opening)
        for text in ("[bet]", "[fold]") * 3:
            outcome = episode.act(environments, text)
            assert outcome.failed is None
        assert outcome.done
        assert sum(one or 0 for one in outcome.rewards) == 0
