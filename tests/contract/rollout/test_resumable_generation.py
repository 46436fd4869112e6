"""Answers that are cut, or whose worker dies, go on from their tokens: on both engines."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from engines.rollout.contract import EngineDead, RolloutResult, Sampling
from engines.rollout.engine import RolloutEngine
from engines.rollout.partial import PartialSamples
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from tests.contract.rollout.world import LONG, World, begun, until


def check_spans(world: World, result: RolloutResult, sampling: Sampling) -> None:
    """Every token's log-prob is that of a rescore by the version which its span names."""
    for prompt, response, logprobs, spans in zip(
        world.column(result, "prompt_ids"),
        world.column(result, "response_ids"),
        world.column(result, "rollout_logprobs"),
        world.column(result, "weight_spans"),
        strict=True,
    ):
        edges = [0, *spans[2::3]]
        assert spans[1::3] == edges[:-1] and edges[-1] == len(response)
        for version, start, stop in zip(spans[0::3], spans[1::3], spans[2::3], strict=True):
            expected = world.logprobs(version, prompt, response[:stop], sampling)[start:]
            np.testing.assert_allclose(logprobs[start:stop], expected, atol=2e-4)


def test_a_cut_shard_goes_on_under_other_weights(
    engine: RolloutEngine, world: World, threads: ThreadPoolExecutor
) -> None:
    request = world.request(world.prompts(), LONG)
    shard = begun(engine, threads, request)
    engine.cut([request.out_key])
    part = shard.result(30)
    assert engine.status().running + engine.status().waiting == 0
    lengths = [len(row) for row in world.column(part, "response_ids")]
    assert max(lengths) < 200
    assert set(world.column(part, "finish_reason")) == {"unfinished"}
    assert set(world.column(part, "status")) == {SampleStatus.UNFINISHED}
    assert (part.stats.unfinished, part.stats.oldest) == (8, 0)
    assert part.stats.tokens == sum(lengths)
    engine.sync(world.weights[1])
    again = dataclasses.replace(request, begun=part.ref, out_key=f"{request.out_key}.2", step=5)
    whole = engine.generate(again)
    assert [len(row) for row in world.column(whole, "response_ids")] == [200] * 8
    for before, after in zip(
        world.column(part, "response_ids"), world.column(whole, "response_ids"), strict=True
    ):
        assert after[: len(before)] == before
    for length, spans in zip(lengths, world.column(whole, "weight_spans"), strict=True):
        assert spans == ([0, 0, length] if length else []) + [1, length, 200]
    check_spans(world, whole, LONG)
    assert (whole.stats.unfinished, whole.stats.oldest, whole.stats.version) == (0, 0, 1)
    assert whole.stats.tokens == 8 * 200 - sum(lengths)
    engine.sync(world.weights[0])


def test_finished_answers_are_kept_as_they_are(engine: RolloutEngine, world: World) -> None:
    request = world.request(world.prompts((5, 9)), dataclasses.replace(LONG, max_new_tokens=9))
    whole = engine.generate(request)
    engine.sync(world.weights[1])
    again = dataclasses.replace(request, begun=whole.ref, out_key=f"{request.out_key}.2")
    same = engine.generate(again)
    for name in ("response_ids", "rollout_logprobs", "weight_spans", "weights_digest", "status"):
        assert world.column(same, name) == world.column(whole, name)
    assert (same.stats.tokens, same.stats.oldest) == (0, 0)
    engine.sync(world.weights[0])


def test_a_shard_that_is_cut_before_it_comes_is_not_begun(
    engine: RolloutEngine, world: World
) -> None:
    request = world.request(world.prompts((5, 9)), LONG)
    engine.cut([request.out_key])
    result = engine.generate(request)
    assert world.column(result, "response_ids") == [[]] * 4
    assert (result.stats.unfinished, result.stats.oldest, result.stats.tokens) == (4, None, 0)
    assert len(engine.generate(request).ref) == 4, "the next shard of that name is sampled"


def test_tokens_are_saved_on_the_way_and_gone_on_with(
    engine: RolloutEngine, world: World, threads: ThreadPoolExecutor
) -> None:
    request = dataclasses.replace(world.request(world.prompts(), LONG), save_every=0.02)
    partial = PartialSamples(world.store, request.out_key)
    shard = begun(engine, threads, request)
    engine.pause()
    until(lambda: tokens(world, partial.read()) > 32, "a save")
    engine.cancel()
    engine.resume()
    with pytest.raises(Exception, match="cancelled"):
        shard.result(30)
    saved = partial.read()
    assert saved is not None, "what was saved stays when the attempt fails"
    before = [row.tolist() for row in saved.fetch_list(world.store, "response_ids")]
    whole = engine.generate(dataclasses.replace(request, save_every=600.0))
    after = world.column(whole, "response_ids")
    assert [row[: len(b)] for row, b in zip(after, before, strict=True)] == before
    assert [len(row) for row in after] == [200] * 8
    check_spans(world, whole, LONG)
    assert partial.read() is None, "a finished shard leaves nothing behind"
    base = request.out_key.removesuffix(".safetensors")
    left = [key for key in world.store.list("samples") if key.startswith(base)]
    assert left == [request.out_key]


def tokens(world: World, saved: BatchRef | None) -> int:
    return 0 if saved is None else int(saved.lengths(world.store, "response_ids").sum())


@pytest.mark.slow
@pytest.mark.vllm
def test_another_engine_goes_on_when_vllm_is_killed(
    built: Callable[[str], RolloutEngine], world: World, threads: ThreadPoolExecutor
) -> None:
    engine = built("vllm")
    engine.sync(world.weights[0])
    request = dataclasses.replace(world.request(world.prompts(), LONG), save_every=0.02)
    partial = PartialSamples(world.store, request.out_key)
    shard = begun(engine, threads, request)
    engine.pause()
    until(lambda: tokens(world, partial.read()) > 32, "a save")
    (pid,) = engine.status().pids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDead):
        shard.result(30)
    other = built("transformers")
    other.sync(world.weights[1])
    saved = partial.read()
    assert saved is not None
    before = [row.tolist() for row in saved.fetch_list(world.store, "response_ids")]
    whole = other.generate(request)
    after = world.column(whole, "response_ids")
    assert [row[: len(b)] for row, b in zip(after, before, strict=True)] == before
    check_spans(world, whole, LONG)


@pytest.mark.vllm
def test_a_prefix_is_shared_within_one_version_only(
    built: Callable[[str], RolloutEngine], world: World
) -> None:
    """Also where a sync keeps the keys and values of answers in progress."""
    engine = built("vllm")
    engine.sync(world.weights[0])
    prompts, sampling = world.prompts((150,)), Sampling(n=1, max_new_tokens=3, seed=5)

    def tokens_from_cache() -> int:
        stats = engine.generate(world.request(prompts, sampling)).stats
        assert stats.read == 150
        return stats.cached

    assert tokens_from_cache() == 0
    assert tokens_from_cache() > 0
    engine.sync(world.weights[1], mode="keep")
    assert tokens_from_cache() == 0, "keys and values of version 0 are not those of version 1"
    assert tokens_from_cache() > 0
    engine.sync(world.weights[0])
