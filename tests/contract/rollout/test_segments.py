"""Segments of a tree: a completion waits at a segment's end, and its branches draw noise of their own."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from engines.rollout.contract import RolloutResult, Sampling
from engines.rollout.engine import RolloutEngine
from storage.batches.columns import SEGMENT, UNFINISHED, SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from tests.contract.rollout.world import World

SAMPLING = Sampling(n=1, max_new_tokens=16, seed=5, ignore_eos=True, segment_tokens=6, segments=2)


def branched(world: World, prompts: BatchRef, result: RolloutResult | None, seeds: list[int], key):
    """Rows of prompts that go on from what they have, or from nothing."""
    count = len(seeds)
    columns: dict[str, object] = {
        "finish_reason": [UNFINISHED] * count,
        "status": np.full(count, SampleStatus.UNFINISHED, np.int64),
        "branch_seed": np.array(seeds, np.int64),
    }
    if result is None:
        columns |= {
            "response_ids": [np.zeros(0, np.int32)] * count,
            "rollout_logprobs": [np.zeros(0, np.float32)] * count,
            "weight_spans": [np.zeros(0, np.int64)] * count,
            "weights_digest": [""] * count,
        }
        return prompts.with_columns(write_batch(world.store, key, columns))
    return result.ref.with_columns(write_batch(world.store, key, columns))


def generated(engine: RolloutEngine, world: World, asked: BatchRef) -> RolloutResult:
    request = world.request(asked, SAMPLING)
    return engine.generate(dataclasses.replace(request, begun=asked))


def test_a_path_waits_at_a_segments_end_and_goes_on_from_it(
    engine: RolloutEngine, world: World
) -> None:
    prompts = world.prompts((5, 9))
    first = generated(engine, world, branched(world, prompts, None, [0, 1], "s/1"))
    assert [len(ids) for ids in world.column(first, "response_ids")] == [6, 6]
    assert set(world.column(first, "finish_reason")) == {SEGMENT}
    assert set(world.column(first, "status")) == {SampleStatus.UNFINISHED}
    last = generated(engine, world, branched(world, prompts, first, [2, 3], "s/2"))
    rows = world.column(last, "response_ids")
    assert [len(ids) for ids in rows] == [16, 16], "the last segment goes on to the end"
    assert set(world.column(last, "finish_reason")) == {"length"}
    for before, ids in zip(world.column(first, "response_ids"), rows, strict=True):
        assert ids[:6] == before
    assert last.stats.tokens == 2 * 10
    for prompt, ids, logprobs in zip(
        world.column(last, "prompt_ids"), rows, world.column(last, "rollout_logprobs"), strict=True
    ):
        assert logprobs == pytest.approx(world.logprobs(0, prompt, ids, SAMPLING), abs=2e-4)


def test_branches_of_one_beginning_differ_by_their_seeds_alone(
    engine: RolloutEngine, world: World
) -> None:
    prompts = world.prompts((5,)).take(np.zeros(4, np.int64))
    drawn = generated(engine, world, branched(world, prompts, None, [7, 8, 9, 7], "s/3"))
    a, b, c, again = world.column(drawn, "response_ids")
    assert a == again and len({tuple(a), tuple(b), tuple(c)}) == 3
    alone = prompts.rows(1, 2)
    one = generated(engine, world, branched(world, alone, None, [8], "s/4"))
    assert world.column(one, "response_ids") == [b], "whatever is beside it"


def test_limits_of_a_segment() -> None:
    free = Sampling(n=1, max_new_tokens=16)
    assert (free.most(0, 0), free.most(9, 0), free.limit(16)) == (16, 16, "length")
    assert [SAMPLING.most(begun, 0) for begun in (0, 3, 6, 10)] == [6, 6, 16, 16]
    assert [SAMPLING.limit(tokens) for tokens in (6, 16)] == [SEGMENT, "length"]
    turns = Sampling(n=1, max_new_tokens=16, max_turn_tokens=4)
    assert [turns.most(9, turn) for turn in (9, 14)] == [13, 16]
    for plain, field in ((free, "segment_tokens"), (free, "segments"), (free, "max_turn_tokens")):
        assert field not in plain.identity, "shards of older runs are found again"
    assert SAMPLING.identity["segments"] == 2
