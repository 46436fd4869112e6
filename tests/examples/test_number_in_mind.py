"""The example of a thinking model over four turns, in which only memory earns more than a quarter."""

from __future__ import annotations

import itertools
import runpy
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from storage.audit.audit import audit
from tests.examples.test_examples import EXAMPLES, copied
from tests.flows.conftest import Launch

MADE = runpy.run_path(str(EXAMPLES / "number_in_mind.py"))
NUMBERS = "0123"


def played(*turns: str) -> tuple[float, list[str]]:
    """The reward of a game, and what was asked after the turns."""
    game = MADE["NumberInMind"]()
    game.reset(question="think")
    asked = []
    for turn in turns:
        assert not game.done, "the game goes on"
        asked.append(game.step(turn))
    return game.get_reward(), asked


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        (["<think>2</think>ok", *["<think></think>ok"] * 2, "<think></think>2"], 1.0),
        (["<think>2</think>ok", *["<think>3</think>ok"] * 2, "<think>3</think>2"], 1.0),
        (["<think>2</think>ok", *["<think>3</think>ok"] * 2, "<think>3</think>3"], 0.0),
        (["<think>2</think>ok", *["<think></think>ok"] * 2, "<think></think>ok"], 0.0),
    ],
    ids=["right", "other thoughts between", "a later thought", "none"],
)
def test_the_first_thought_is_asked_for(turns: list[str], reward: float) -> None:
    assert played(*turns) == (reward, ["wait", "wait", "say", ""])


@pytest.mark.parametrize(
    "aloud",
    [
        "<think>2</think>2",
        "2",
        "<think>2</think>ok2",
        "<think>2",
        "<think></think>ok",
        "2</think>ok",
    ],
)
def test_a_number_that_is_said_aloud_ends_the_game(aloud: str) -> None:
    """Else the answers, which every template keeps, would hold what only the thought may."""
    game = MADE["NumberInMind"]()
    game.reset()
    game.step(aloud)
    assert game.done
    assert game.get_reward() == 0.0


def mean_recall(numbers: Sequence[str], said: Sequence[str]) -> float:
    """Mean reward of episodes that thought of these numbers and said those."""
    texts = [f"<think>{n}</think>ok" for n in numbers]
    right = [float(a == b) for a, b in zip(numbers, said, strict=True)]
    rewards = MADE["recall"](texts, right, ["game"] * len(texts))
    return statistics.mean(rewards)


def test_memory_earns_one_and_nothing_else_more_than_a_quarter() -> None:
    """All eight-fold choices of numbers, against each number that can be said without knowing them."""
    for numbers in itertools.combinations_with_replacement(NUMBERS, 8):
        thought_of = len(set(numbers))
        assert mean_recall(numbers, numbers) == pytest.approx(thought_of / 4)
        blind = [mean_recall(numbers, said * 8) for said in NUMBERS]
        assert blind == pytest.approx([0.25 * (said in numbers) for said in NUMBERS])


@pytest.mark.slow
@pytest.mark.cluster
def test_a_policy_learns_to_say_what_it_thought_where_it_reads_its_thoughts(
    launch: Launch, tmp_path: Path
) -> None:
    copied(tmp_path)
    MADE["write_model"](tmp_path / "model")
    run = launch("number_in_mind.yaml")
    code, out = run.end(timeout=2400)  # minutes, and many on a machine that does much else
    assert code == 0, out
    commits = run.commits()
    assert audit(run.files).problems == []

    def last(task: str) -> float:
        return statistics.mean(
            commit.metrics[f"task/{task}/reward/mean"] or 0.0 for commit in commits[-4:]
        )

    assert all(commit.metrics["episode/drift"] == 0 for commit in commits)
    assert last("remembers") > 0.4, "two numbers of four earn 0.5"
    assert last("forgets") < 0.35
