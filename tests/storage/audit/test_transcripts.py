"""Which samples are shown, and how their texts are made harmless."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from storage.audit.samples import SampleOrigin, by_author, ending, few, printable
from storage.batches.columns import Author
from storage.batches.forest import Forest


@pytest.mark.parametrize(
    ("by_reward", "failed", "count", "rows"),
    [
        ([5, 3, 9, 1, 7], [], 3, [5, 9, 7]),
        ([5, 3, 9, 1, 7], [2, 4], 3, [5, 7, 2]),
        ([5, 3], [], 4, [5, 3]),
        ([5, 3], [8], 1, [5]),
        ([], [8, 2], 1, [8]),
        ([], [8, 2], 3, [8]),
        ([], [], 3, []),
    ],
)
def test_the_best_the_worst_and_one_that_failed(
    by_reward: list[int], failed: list[int], count: int, rows: list[int]
) -> None:
    assert few(by_reward, failed, count) == rows


def test_a_terminal_obeys_nothing_that_a_model_wrote() -> None:
    assert printable("a\tb\n\x1b[2Jc\r\x9b5n\x7f", 0) == "a\tb\n\\x1b[2Jc\\x0d\\x9b5n\\x7f"
    assert printable("x" * 30, 10) == f"{'x' * 5}\n[… 20 characters …]\n{'x' * 5}"
    assert printable("x" * 10, 10) == "x" * 10


def test_branches_of_an_episode_are_shown_apart() -> None:
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(10)}))
    forest = Forest(prompt=2, lengths=np.array([3, 1, 2]), parents=np.array([2, 4, 0]))
    authors = [Author.POLICY] * 3 + [Author.POLICY] + [Author.ENVIRONMENT, Author.POLICY]
    assert by_author(words, [5, 6], [7, 8, 9, 4, 3, 2], authors, forest) == (
        ("policy", "w7 w8 w9"),
        ("branch", "w5 w6 w7 w8"),
        ("policy", "w4"),
        ("branch", ""),
        ("environment", "w3"),
        ("policy", "w2"),
    )
    assert by_author(words, [5, 6], [7, 8], authors[:2]) == (("policy", "w7 w8"),)


ORIGIN = SampleOrigin(
    run="r",
    step=1,
    sample=3,
    group=0,
    prompt_row=7,
    worker="rollout-0",
    attempt=1,
    spans=(),
    weights_digest="d",
    tokens=5,
    finish_reason="stop",
    status=0,
    reward=1.0,
    scores={},
    extras={},
    reward_code="",
    trained=True,
    advantage=0.5,
)


@pytest.mark.parametrize(
    ("episode", "said"),
    [
        ({}, "stop"),
        ({"episode_end": "turns", "turn_rewards": (None, None)}, "episode ended: turns"),
        (
            {"episode_end": "done", "turn_rewards": (None, 0.25, 1.0)},
            "episode ended: done, rewards by turn - 0.25 1",
        ),
        (
            {"episode_end": "failed", "episode_error": "it hung", "turn_rewards": (0.5,)},
            "episode ended: failed, it hung",
        ),
    ],
)
def test_how_a_sample_ended(episode: dict[str, Any], said: str) -> None:
    assert ending(replace(ORIGIN, **episode)) == said
