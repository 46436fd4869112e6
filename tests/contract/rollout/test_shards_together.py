"""The transformers engine decodes shards in one batch, and a row's bits do not tell in which."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

from configs.model import RandomModel
from engines.models import checkpoints
from engines.rollout.contract import RolloutRequest, Sampling
from engines.rollout.engine import RolloutEngine
from engines.rollout.hf_decoding import Decoding, Reader, Row
from engines.rollout.hf_engine import HFEngine
from engines.rollout.hf_rows import Cached, KeysAndValues
from engines.rollout.samples import NOTHING
from storage.batches.refs import BatchRef
from tests.contract.rollout.world import World, until

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (5, 9, 3, 17, 40, 62, 64, 65)
SAMPLING = Sampling(n=1, max_new_tokens=60, seed=5, ignore_eos=True)
PAIRS = Sampling(n=2, max_new_tokens=60, seed=5, ignore_eos=True)


@pytest.fixture
def engine(
    built: Callable[[str], RolloutEngine], world: World, monkeypatch: pytest.MonkeyPatch
) -> RolloutEngine:
    found = built("transformers")
    assert isinstance(found, HFEngine)
    monkeypatch.setattr(found._decoding, "apart", False)  # it was built with all threads
    if found.version != 0:
        found.sync(world.weights[0])
    return found


def sampled(
    engine: RolloutEngine, world: World, prompts: BatchRef, parts: list[list[int]]
) -> dict[int, tuple[list[int], list[float]]]:
    """Tokens and log-probs by sample, of shards that are all in flight before the first token."""
    requests = [world.request(prompts.take(rows), PAIRS) for rows in parts]
    with ThreadPoolExecutor(len(parts)) as threads:
        engine.pause()
        shards = [threads.submit(engine.generate, request) for request in requests]
        until(lambda: engine.status().waiting == 2 * len(prompts), "all shards being in flight")
        engine.resume()
        results = [shard.result(120) for shard in shards]
    names = ("sample_id", "response_ids", "rollout_logprobs")
    return {
        sample: (tokens, logprobs)
        for result in results
        for sample, tokens, logprobs in zip(
            *(world.column(result, name) for name in names), strict=True
        )
    }


def test_shards_in_flight_take_the_steps_of_one(engine: RolloutEngine, world: World) -> None:
    prompts = world.prompts(LENGTHS[:4])
    with mock.patch.object(Decoding, "step", autospec=True, side_effect=Decoding.step) as steps:
        apart = sampled(engine, world, prompts, [[0], [1], [2], [3]])
        assert steps.call_count == PAIRS.max_new_tokens
        together = sampled(engine, world, prompts, [[2, 0, 3, 1]])
    assert apart == together, "to the bit"


def test_an_engine_decodes_no_more_rows_at_once_than_it_is_told(
    engine: RolloutEngine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = world.prompts(LENGTHS[:4])
    whole = sampled(engine, world, prompts, [[0, 1], [2, 3]])
    rollout = engine._spec.rollout.model_copy(update={"max_sequences": 3})
    monkeypatch.setattr(engine, "_spec", engine._spec.model_copy(update={"rollout": rollout}))
    seen: list[int] = []
    step = Decoding.step

    def counted(self: Decoding, rows: list[Row], version: int) -> None:
        seen.append(len(rows))
        step(self, rows, version)

    monkeypatch.setattr(Decoding, "step", counted)
    assert sampled(engine, world, prompts, [[0, 1], [2, 3]]) == whole
    assert max(seen) == 3


def test_an_error_in_a_step_ends_all_shards_and_the_next_are_sampled(
    engine: RolloutEngine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Decoding, rows: list[Row], version: int) -> None:
        raise RuntimeError("out of luck")

    requests = [world.request(world.prompts((5,)), PAIRS) for _ in range(3)]
    ended: list[str] = []
    barrier = threading.Barrier(3)

    def run(request: RolloutRequest) -> None:
        barrier.wait(30)
        try:
            engine.generate(request)
        except RuntimeError as error:
            ended.append(str(error))

    with monkeypatch.context() as patched, ThreadPoolExecutor(3) as threads:
        patched.setattr(Decoding, "step", broken)
        list(threads.map(run, requests))
    assert ended == ["out of luck"] * 3
    assert len(engine.generate(requests[0]).ref) == 2


@pytest.fixture(scope="module")
def parts(world: World) -> tuple[Decoding, Reader]:
    model = RandomModel(seed=3, layers=2, hidden_size=64, heads=4)
    directory = checkpoints.materialize(model, world.cache)
    built = checkpoints.build_untied(directory, "float32", "cpu")
    policy = checkpoints.load_for_training(directory)
    built.load_state_dict({**policy.state_dict()})
    reader = Reader(
        tokenizer=world.tokenizer,
        ends=frozenset(),
        max_model_len=256,
        device=torch.device("cpu"),
    )
    decoding = Decoding(built)
    return decoding, reader


def row(reader: Reader, number: int) -> Row:
    prompt = [4 + (i * (number + 3)) % 90 for i in range(LENGTHS[number])]
    return Row(prompt, number, SAMPLING, reader, NOTHING)


def test_rows_join_and_leave_without_changing_a_bit(parts: tuple[Decoding, Reader]) -> None:
    """Row r joins at step 7 r, so all are there at some time and none begins or ends together."""
    decoding, reader = parts
    alone = [row(reader, number) for number in range(len(LENGTHS))]
    for each in alone:
        while not each.ended:
            decoding.step([each], 0)
    joined = [row(reader, number) for number in range(len(LENGTHS))]
    at_once = 0
    for number in range(1000):
        there = [each for r, each in enumerate(joined) if number >= 7 * r and not each.ended]
        at_once = max(at_once, len(there))
        if there:
            decoding.step(there, 0)
    assert at_once == len(LENGTHS)
    for one, other in zip(alone, joined, strict=True):
        assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
    assert len({tuple(each.tokens) for each in alone}) == len(alone)


def test_slots_are_used_again_and_rows_keep_what_is_theirs() -> None:
    cache, like = KeysAndValues(), torch.ones(1, 1, 2)  # one head of two numbers
    rows = [Cached() for _ in range(20)]
    for number, each in enumerate(rows):
        cache.place(each, 3)
        assert each.shelf is not None
        keys, _ = each.shelf.layer(0, like, like)
        keys[each.slot, :, :3] = number + 1.0
        each.length = 3
    for number in (19, 0, 7):
        cache.remove(rows[number])
    cache.place(rows[4], 100)  # moves to a wider shelf
    cache.place(Cached(), 5)
    for number, each in enumerate(rows):
        if number in (19, 0, 7):
            assert each.shelf is None
            continue
        assert each.shelf is not None and each.shelf.rows[each.slot] is each
        keys, _ = each.shelf.layer(0, like, like)
        assert keys[each.slot, 0, :3].eq(number + 1.0).all()
        assert keys[each.slot, 0, 3:].eq(0).all()
    assert rows[4].shelf is not None and rows[4].shelf.width == 128
    _, order = cache.step(torch.device("cpu"))
    assert len(order) == 18 and order[-1] is rows[4]
