"""Turns of an episode: a completion goes on after tokens that others wrote, on both engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from engines.rollout.contract import RolloutResult, Sampling
from engines.rollout.engine import RolloutEngine
from storage.batches.columns import EPISODE, UNFINISHED, WAITING, Author, SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from tests.contract.rollout.world import World

SAID = [20, 21, 22]  # by the environment, and one token of the template
BY = [Author.ENVIRONMENT, Author.ENVIRONMENT, Author.TEMPLATE]
TURN = 6
SAMPLING = Sampling(n=2, max_new_tokens=40, max_turn_tokens=TURN, seed=5, ignore_eos=True)


def answered(world: World, result: RolloutResult, key: str) -> BatchRef:
    """What the policy wrote, and an answer to each row."""
    authors = [Author.POLICY] * TURN
    if "author" in result.ref.names:
        authors = world.column(result, "author")[0]
    rows = world.column(result, "response_ids")
    count = len(rows)
    columns: dict[str, object] = {
        "response_ids": [np.array(ids + SAID, np.int32) for ids in rows],
        "rollout_logprobs": [
            np.array([*given, 0, 0, 0], np.float32)
            for given in world.column(result, "rollout_logprobs")
        ],
        "author": [np.array([*authors, *BY], np.uint8)] * count,
        "finish_reason": ["unfinished"] * count,
        "status": np.full(count, SampleStatus.UNFINISHED, np.int64),
        "observations": [[f"said {row}"] for row in range(count)],
        "turn_rewards": [np.array([0.5], np.float32)] * count,
        "env_seconds": np.full(count, 0.25),
        "episode": [""] * count,
        "episode_error": [""] * count,
    }
    written = write_batch(world.store, f"{key}.answered", columns)
    kept = [name for name in result.ref.names if name not in columns]
    return result.ref[kept].with_columns(written)


def test_turns_go_on_after_what_others_wrote(engine: RolloutEngine, world: World) -> None:
    request = world.request(world.prompts((5, 9)), SAMPLING)
    result = engine.generate(request)
    assert [len(row) for row in world.column(result, "response_ids")] == [TURN] * 4
    assert set(world.column(result, "finish_reason")) == {"length"}
    assert "author" not in result.ref.names, "nobody else has written"
    ref = result.ref
    for turn in (1, 2):
        ref = answered(world, result, f"{request.out_key}.{turn}")
        again = dataclasses.replace(request, begun=ref, out_key=f"{request.out_key}.{turn}")
        result = engine.generate(again)
        assert result.stats.tokens == 4 * TURN
    length = 3 * TURN + 2 * len(SAID)
    spans = [0, 0, TURN, 0, TURN + 3, 2 * TURN + 3, 0, 2 * TURN + 6, length]
    before = ref.fetch_list(world.store, "response_ids")
    for prompt, begun, ids, logprobs, authors, mask, found in zip(
        world.column(result, "prompt_ids"),
        before,
        world.column(result, "response_ids"),
        world.column(result, "rollout_logprobs"),
        world.column(result, "author"),
        world.column(result, "response_mask"),
        world.column(result, "weight_spans"),
        strict=True,
    ):
        assert (len(ids), ids[: len(begun)]) == (length, begun.tolist()), "nothing is drawn anew"
        assert ids[TURN : TURN + 3] == SAID
        assert mask == [int(author == Author.POLICY) for author in authors]
        assert authors == ([1] * TURN + BY) * 2 + [1] * TURN
        assert found == spans, "no policy version wrote what others said"
        expected = world.logprobs(0, prompt, ids, SAMPLING)
        for place, author in enumerate(authors):
            wanted = expected[place] if author == Author.POLICY else 0.0
            assert logprobs[place] == pytest.approx(wanted, abs=2e-4)
    assert all(name in result.ref.names for name in EPISODE)
    assert world.column(result, "turn_rewards") == [[0.5]] * 4


def test_who_waits_for_another_player_is_left_alone(engine: RolloutEngine, world: World) -> None:
    """And so is what had ended, such as a sample whose episode failed."""
    request = world.request(world.prompts((5, 9)), SAMPLING)
    ref = answered(world, engine.generate(request), f"{request.out_key}.1")
    going = [UNFINISHED, WAITING, "stop", UNFINISHED]
    status = [SampleStatus.UNFINISHED, SampleStatus.UNFINISHED, SampleStatus.FAILED, 3]
    columns: dict[str, object] = {
        "finish_reason": going,
        "status": np.array(status, np.int64),
        "unused_tokens": np.array([0, 0, 5, 0]),
    }
    begun = ref.with_columns(write_batch(world.store, f"{request.out_key}.2", columns))
    again = dataclasses.replace(request, begun=begun, out_key=f"{request.out_key}.3")
    result = engine.generate(again)
    assert result.stats.tokens == 2 * TURN
    assert result.stats.unfinished == 0
    before = begun.fetch_list(world.store, "response_ids")
    after = world.column(result, "response_ids")
    assert [len(b) - len(a) for a, b in zip(before, after, strict=True)] == [TURN, 0, 0, TURN]
    assert world.column(result, "finish_reason") == ["length", WAITING, "stop", "length"]
    assert world.column(result, "unused_tokens") == [0, 0, 5, 0]
    mask = world.column(result, "response_mask")[2]
    assert mask == [1] * (TURN - 2) + [0] * 5, "what was not acted on still does not train"
    assert world.column(result, "status") == [
        *(SampleStatus.TRUNCATED, SampleStatus.UNFINISHED),
        *(SampleStatus.FAILED, SampleStatus.TRUNCATED),
    ]


@pytest.mark.vllm
def test_what_stands_is_read_from_the_prefix_cache(
    built: Callable[[str], RolloutEngine], world: World
) -> None:
    """From the second turn on; the transformers engine has no such cache and says nothing."""
    engine = built("vllm")
    engine.sync(world.weights[0])
    request = world.request(world.prompts((140,)), SAMPLING)
    result = engine.generate(request)
    assert result.stats.read == 2 * 140
    ref = answered(world, result, f"{request.out_key}.1")
    again = dataclasses.replace(request, begun=ref, out_key=f"{request.out_key}.1")
    stats = engine.generate(again).stats
    assert stats.read == 2 * (140 + TURN + len(SAID))
    assert stats.cached >= 2 * 128, "whole blocks of the prompt at least"


def test_a_turn_draws_other_noise_than_the_one_before(engine: RolloutEngine, world: World) -> None:
    """The same prompt at each turn would be answered alike with one seed."""
    request = world.request(world.prompts((5,)), SAMPLING)
    first = engine.generate(request)
    ref = answered(world, first, request.out_key)
    second = engine.generate(
        dataclasses.replace(request, begun=ref, out_key=f"{request.out_key}.2")
    )
    for ids in world.column(second, "response_ids"):
        assert ids[:TURN] != ids[TURN + 3 :]


def test_the_limit_of_the_conversation_counts_what_others_wrote(
    engine: RolloutEngine, world: World
) -> None:
    sampling = dataclasses.replace(SAMPLING, max_new_tokens=TURN + 3 + 2)
    request = world.request(world.prompts((5,)), sampling)
    ref = answered(world, engine.generate(request), request.out_key)
    result = engine.generate(
        dataclasses.replace(request, begun=ref, out_key=f"{request.out_key}.2")
    )
    assert [len(ids) for ids in world.column(result, "response_ids")] == [TURN + 5] * 2
    assert set(world.column(result, "status")) == {SampleStatus.TRUNCATED}


def test_one_completion_alone_is_the_one_beside_the_others(
    engine: RolloutEngine, world: World
) -> None:
    """Its number, its noise, and so its tokens, turn after turn."""
    prompts = world.prompts((5, 9))
    request = world.request(prompts, SAMPLING)
    whole = engine.generate(request)
    second = answered(world, whole, request.out_key)
    later = engine.generate(
        dataclasses.replace(request, begun=second, out_key=f"{request.out_key}.2")
    )
    for row, k in [(0, 0), (1, 1)]:
        only = dataclasses.replace(
            world.request(prompts.rows(row, row + 1), SAMPLING.only(k)), step=request.step
        )
        alone = engine.generate(only)
        ref = answered(world, alone, only.out_key)
        going = engine.generate(dataclasses.replace(only, begun=ref, out_key=f"{only.out_key}.2"))
        for one, all_of_them in ((alone, whole), (going, later)):
            for name in ("sample_id", "response_ids"):
                assert world.column(one, name) == [world.column(all_of_them, name)[2 * row + k]]


@pytest.mark.vllm
def test_vllm_says_how_full_its_cache_is(
    built: Callable[[str], RolloutEngine], world: World
) -> None:
    """Where it counts; the transformers engine says nothing."""
    measured = built("vllm-ngram")
    measured.sync(world.weights[0])
    share = measured.generate(world.request(world.prompts((140,)), SAMPLING)).stats.cache_use
    assert share is not None
    assert 0 <= share <= 1
    other = built("transformers")
    other.sync(world.weights[0])
    assert other.generate(world.request(world.prompts((5,)), SAMPLING)).stats.cache_use is None
