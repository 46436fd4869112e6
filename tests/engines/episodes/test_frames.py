"""Frames beside stored episodes, turns of a fixed length, and tokens that nothing acted on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.data import DataConfig, FunctionSource
from configs.episodes import EpisodesConfig, GymnasiumEnvironment
from configs.model import RandomModel
from engines.episodes.contract import AnswerRequest, EnvironmentSpec
from engines.episodes.environment_engine import EnvironmentEngine
from engines.episodes.frames import FRAME, frames_by_turn, unused_tokens
from storage.batches.columns import Author, SampleStatus, policy_mask
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store

CODEC = """
import numpy as np

class Lake:
    def describe(self, observation, info): return f"{observation}:"
    def frame(self, observation, info): return np.full((2, 2), observation, np.uint8)
    def actions(self, text):
        return [(int(one) % 4, place) for place, one in enumerate(text, 1)]

def rows():
    return [{"question": "lake "}] * 3
"""


class Words:
    """A tokenizer whose tokens are texts of one to three characters."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join("x" * number for number in ids)


def test_tokens_after_the_last_action_that_counted() -> None:
    words: Any = Words()
    assert unused_tokens(words, [2, 1, 3], 6) == 0
    assert unused_tokens(words, [2, 1, 3], 4) == 0, "the border is in the last token"
    assert unused_tokens(words, [2, 1, 3], 3) == 1
    assert unused_tokens(words, [2, 1, 3], 2) == 2
    assert unused_tokens(words, [2, 1, 3], 0) == 3
    assert unused_tokens(None, [7, 7, 7], 1) == 2, "counted in tokens"


def test_what_was_not_acted_on_does_not_train() -> None:
    authors = np.array([1, 1, 2, 1, 1], np.uint8)
    assert policy_mask(authors).tolist() == [1, 1, 0, 1, 1]
    assert policy_mask(authors, 1).tolist() == [1, 1, 0, 1, 0]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EnvironmentEngine]:
    pytest.importorskip("gymnasium")
    (tmp_path / "lake.py").write_text(CODEC)
    environment = GymnasiumEnvironment(
        id="FrozenLake-v1", params={"is_slippery": False}, codec=f"{tmp_path}/lake.py:Lake"
    )
    made = EnvironmentEngine(
        EnvironmentSpec(
            model=RandomModel(),
            model_cache=str(tmp_path / "models"),
            data=DataConfig(
                source=FunctionSource(path=f"{tmp_path}/lake.py:rows"), template="plain"
            ),
            episodes=EpisodesConfig(
                environment=environment, processes=1, max_turn_tokens=3, full_turn="counts"
            ),
            max_new_tokens=200,
            frames=True,
            store_uri=f"file://{tmp_path}/store",
            store_options={},
        )
    )
    yield made
    made.close()


def turn(
    engine: EnvironmentEngine, store: Store, before: BatchRef, number: int, texts: list[str]
) -> BatchRef:
    """The policy's next turns, written as an engine does; '' where an episode is over."""
    begun = "author" in before.names
    nothing: list[Any] = [[]] * len(texts)
    old = {
        name: before.fetch_list(store, name) if begun else nothing
        for name in ("response_ids", "author", "rollout_logprobs")
    }
    new = [engine._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    columns: dict[str, object] = {
        "response_ids": [
            np.array([*a, *b], np.int32) for a, b in zip(old["response_ids"], new, strict=True)
        ],
        "author": [
            np.array([*a, *[Author.POLICY] * len(b)], np.uint8)
            for a, b in zip(old["author"], new, strict=True)
        ],
        "rollout_logprobs": [
            np.array([*a, *[-1.0] * len(b)], np.float32)
            for a, b in zip(old["rollout_logprobs"], new, strict=True)
        ],
        "finish_reason": ["length" if len(one) == 3 else "stop" for one in new],
        "status": np.full(len(texts), SampleStatus.TRUNCATED, np.int64),
        "sample_id": np.arange(len(texts)) + 70,
    }
    written = write_batch(store, f"turn-{number}.safetensors", columns)
    return before.with_columns(written)


def test_frames_are_stored_beside_the_episodes(engine: EnvironmentEngine, tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/store")
    made = engine.prompts([1], 7, "prompts.safetensors")
    assert made.ref is not None
    first = made.ref.fetch_numpy(store, "opening_frame")[0]
    assert first.shape == (1, 2, 2) and first.dtype == np.uint8
    asked = turn(engine, store, made.ref.take(np.zeros(2, int)), 1, ["112", "?"])
    got = engine.answer(AnswerRequest(samples=asked, frames=True), "answer-1.safetensors")
    assert got.frames is not None
    assert got.frames.fetch_numpy(store, "sample_id")[0].tolist() == [70], "the other did not act"
    assert got.frames.fetch_numpy(store, "turn")[0].tolist() == [0]
    assert got.frames.fetch_numpy(store, "frame")[0].tolist() == [[[9, 9], [9, 9]]]
    assert got.unfinished == 2, "a full turn counts as one"
    assert not any("frames" in key for key in got.ref.objects), "they are objects of their own"
    asked = turn(engine, store, got.ref, 2, ["1", "11"])
    got = engine.answer(AnswerRequest(samples=asked, frames=True), "answer-2.safetensors")
    assert got.frames is not None
    assert got.frames.fetch_numpy(store, "turn")[0].tolist() == [1, 1]
    assert got.frames.fetch_numpy(store, "frame")[0][:, 0, 0].tolist() == [13, 8]
    asked = turn(engine, store, got.ref, 3, ["220", "211"])  # both end in their second action
    got = engine.answer(AnswerRequest(samples=asked), "answer-3.safetensors")
    assert got.frames is None, "not asked for"
    assert got.ref.fetch_list(store, "episode") == ["done", ""]
    assert got.ref.fetch_numpy(store, "status")[0].tolist() == [
        SampleStatus.OK,
        SampleStatus.UNFINISHED,
    ]
    assert got.ref.fetch_numpy(store, "unused_tokens")[0].tolist() == [1, 0]
    mask = got.ref.fetch_list(store, "response_mask")[0]
    authors = got.ref.fetch_list(store, "author")[0]
    assert np.asarray(mask)[-3:].tolist() == [1, 1, 0]
    assert np.asarray(authors)[-3:].tolist() == [Author.POLICY] * 3
    assert engine.replay(got.ref.take([0])) == []


def test_a_conversation_without_room_still_ends(engine: EnvironmentEngine, tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/store")
    made = engine.prompts([1], 7, "prompts.safetensors")
    assert made.ref is not None
    asked = turn(engine, store, made.ref, 1, ["1" * 200])
    long = write_batch(store, "cut.safetensors", {"finish_reason": ["length"]})
    got = engine.answer(
        AnswerRequest(samples=asked.with_columns(long), frames=True), "answer-1.safetensors"
    )
    assert got.ref.fetch_list(store, "episode") == ["tokens"]


def test_a_policy_that_looks_is_given_the_frame_before_each_turn(
    engine: EnvironmentEngine, tmp_path: Path
) -> None:
    """The present one between turns, and once all is over those of all turns; by reference."""
    store = Store(f"file://{tmp_path}/store")
    episodes = engine._spec.episodes.model_copy(update={"sees": "frames"})
    engine._spec = engine._spec.model_copy(update={"episodes": episodes})
    made = engine.prompts([1], 7, "prompts.safetensors")
    assert made.ref is not None
    prompts, answers = made.ref, []
    ref = prompts.take(np.zeros(3, int))
    for number, texts in enumerate((["112", "?", "1"], ["1", "?", "1"], ["1", "?", "2"]), 1):
        asked = turn(engine, store, ref, number, texts)
        got = engine.answer(
            AnswerRequest(samples=asked, frames=True), f"answer-{number}.safetensors"
        )
        assert got.frames is not None
        answers.append(got.frames)
        ref = got.ref
        present = ref.fetch_numpy(store, FRAME)[0][:, 0, 0].tolist()
        assert present == [[9, 0, 4], [13, 0, 8], [13, 0, 9]][number - 1]
    written = set().union(*(one.objects for one in (prompts, *answers)))
    column = frames_by_turn(store, prompts, ref, BatchRef.concat(answers))
    seen = [np.asarray(one)[:, 0, 0].tolist() for one in column.fetch_list(store, FRAME)]
    assert seen == [[0, 9, 13], [0, 0, 0], [0, 4, 8]], "what is no action changes nothing"
    assert column.objects <= written, "no frame is stored again"
    unanswered = turn(engine, store, prompts, 4, ["1"])
    numbers = write_batch(store, "numbers.safetensors", {"turn_ids": [np.zeros(1, np.int64)]})
    alone = frames_by_turn(store, prompts, unanswered.with_columns(numbers), None)
    assert alone.lengths(store, FRAME).tolist() == [1]
