"""A step that fails because its samples have no reward says what kept them from one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from engines.rewards.runner import NO_FUNCTION
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from tasks.advantage import causes_of
from tasks.results import FailureCause, Scored

GUESSING = str(Path(__file__).parents[2] / "examples" / "guessing.yaml")
FAILED, DONE = int(SampleStatus.FAILED), int(SampleStatus.OK)


def scored(ref: BatchRef, *causes: FailureCause) -> Scored:
    failures = sum(cause.samples for cause in causes)
    return Scored(
        sampled=(), ref=ref, failures=failures, code=(), seconds=0.0, metrics={}, causes=causes
    )


def episodes(
    folder: Path, ends: list[str], errors: list[str], status: list[int]
) -> tuple[Store, BatchRef]:
    store = Store(f"file://{folder}")
    columns = {"episode": ends, "episode_error": errors, "status": np.array(status)}
    return store, write_batch(store, "samples.safetensors", columns)


def test_a_functions_own_error_is_told_with_its_place(tmp_path: Path) -> None:
    store, ref = episodes(tmp_path, [""] * 4, [""] * 4, [FAILED] * 4)
    ref = ref.drop(["episode", "episode_error"])
    config = load_recipe(GRPOConfig, "tiny")
    said = causes_of(config, store, ref, [
        scored(ref, FailureCause(function="mine", error="KeyError: 'x' (mine.py:3)", samples=2)),
        scored(ref, FailureCause(function="mine", error="KeyError: 'x' (mine.py:3)", samples=1),
               FailureCause(function="other", error="did not end within 30 s", samples=1)),
    ])  # fmt: skip
    assert said == (
        "3 of 4 samples: mine: KeyError: 'x' (mine.py:3). 1 of 4 samples: other: did not end within 30 s."
    )


@pytest.mark.parametrize(
    ("end", "word", "said"),
    [
        ("turn_tokens", "episodes.max_turn_tokens=8", "turn_tokens (episodes.max_turn_tokens = 8)"),
        ("turns", "episodes.max_turns=1", "turns (episodes.max_turns = 1)"),
        ("tokens", "rollout.max_new_tokens=20", "tokens (rollout.max_new_tokens = 20)"),
        ("turn_seconds", "episodes.turn_timeout=2", "turn_seconds (episodes.turn_timeout = 2)"),
        ("seconds", "episodes.timeout=90", "seconds (episodes.timeout = 90)"),
        ("deadline", "episodes.deadline=90", "deadline (episodes.deadline = 90.0)"),
    ],
)
def test_episodes_that_a_limit_ended_are_told_with_its_setting(
    tmp_path: Path, end: str, word: str, said: str
) -> None:
    store, ref = episodes(tmp_path, [end] * 16, [""] * 16, [FAILED] * 16)
    config = load_recipe(GRPOConfig, GUESSING, [word])
    cause = FailureCause(function="environment", error=NO_FUNCTION, samples=16)
    assert causes_of(config, store, ref, [scored(ref, cause)]) == (
        f"16 of 16 episodes ended by {said} before the environment gave a reward."
    )


def test_an_episode_with_a_reward_is_not_counted_and_an_error_is_told(tmp_path: Path) -> None:
    ends, errors = (
        ["done", "failed", "failed"],
        ["", "ValueError: no move\nmore", "ValueError: no move"],
    )
    store, ref = episodes(tmp_path, ends, errors, [DONE, FAILED, FAILED])
    config = load_recipe(GRPOConfig, GUESSING)
    cause = FailureCause(function="environment", error=NO_FUNCTION, samples=2)
    said = causes_of(config, store, ref, [scored(ref, cause)])
    assert said.startswith(
        "2 of 3 episodes ended by failed: ValueError: no move before the environment"
    )
    assert said.endswith("in a new run complete trains on its others (1 were scored here).")
