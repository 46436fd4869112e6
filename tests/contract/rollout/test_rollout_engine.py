"""The contract of engines.rollout.contract, on both engines; vLLM is the real one, started once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from engines.failures import WeightMismatch
from engines.rollout.contract import (
    EngineDead,
    NoWeights,
    RolloutCancelled,
    RolloutResult,
    Sampling,
)
from engines.rollout.engine import RolloutEngine
from storage.batches.columns import SampleStatus
from storage.batches.writing import write_batch
from storage.objects.errors import ObjectDamaged
from storage.runs.run_store import OwnRunStore
from storage.runs.weights import open_manifest
from storage.runs.weights_writing import publish
from tests.contract.rollout import test_grammars, test_weight_transfer
from tests.contract.rollout.world import LONG, MAX_MODEL_LEN, RUN, SHORT, World, begun, until


def test_a_sample_is_complete(engine: RolloutEngine, world: World) -> None:
    prompts = world.prompts()
    result = engine.generate(world.request(prompts, SHORT))
    rows = {name: world.column(result, name) for name in result.ref.names}
    assert len(result.ref) == 12
    assert rows["group_id"] == [100] * 3 + [101] * 3 + [102] * 3 + [103] * 3
    assert rows["sample_id"] == [group * 3 + k for group in range(100, 104) for k in range(3)]
    assert rows["prompt_row"] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert [len(tokens) for tokens in rows["prompt_ids"]] == [5] * 3 + [9] * 3 + [3] * 3 + [17] * 3
    for tokens, logprobs, mask, spans in zip(
        rows["response_ids"],
        rows["rollout_logprobs"],
        rows["response_mask"],
        rows["weight_spans"],
        strict=True,
    ):
        assert 1 <= len(tokens) <= 24
        assert len(logprobs) == len(mask) == len(tokens)
        assert set(mask) == {1}
        assert spans == [0, 0, len(tokens)]
    for tokens, status, reason in zip(
        rows["response_ids"], rows["status"], rows["finish_reason"], strict=True
    ):
        ended = tokens[-1] == world.tokenizer.eos_token_id
        assert reason == ("stop" if ended else "length")
        assert status == (SampleStatus.OK if ended else SampleStatus.TRUNCATED)
        assert ended or len(tokens) == 24
    assert set(rows["weights_digest"]) == {world.weights[0].digest}
    assert set(rows["worker"]) == {"w1"}
    assert set(rows["attempt"]) == {2}
    stats = result.stats
    assert (stats.rows, stats.version, stats.digest) == (12, 0, world.weights[0].digest)
    assert stats.tokens == sum(len(tokens) for tokens in rows["response_ids"])
    assert stats.truncated == rows["status"].count(SampleStatus.TRUNCATED)


def test_a_prompt_may_have_a_limit_of_its_own(engine: RolloutEngine, world: World) -> None:
    prompts = world.prompts()
    limits = {"max_new_tokens": np.array([5, 99, 1, 24])}
    limited = prompts.with_columns(write_batch(world.store, "limits.safetensors", limits))
    whole = world.column(engine.generate(world.request(prompts, SHORT)), "response_ids")
    result = engine.generate(world.request(limited, SHORT))
    assert "max_new_tokens" not in result.ref.names
    for row, tokens in enumerate(world.column(result, "response_ids")):
        limit = (5, 24, 1, 24)[row // 3]
        assert tokens == whole[row][:limit], "the same tokens, up to the limit"
        cut = len(whole[row]) > limit
        reason = world.column(result, "finish_reason")[row]
        assert reason == "length" if cut else reason in ("stop", "length")
        assert not cut or world.column(result, "status")[row] == SampleStatus.TRUNCATED


def test_of_two_attempts_the_one_that_was_marked_first_stands(
    engine: RolloutEngine, world: World
) -> None:
    first = dataclasses.replace(world.request(world.prompts(), SHORT), marked=True)
    made = engine.generate(first)
    again = engine.generate(dataclasses.replace(first, attempt=3, worker="w2"))
    assert again == made
    # A flow that has not heard of it, and is resumed, finds it.
    found = OwnRunStore(world.store, RUN).finished(first.out_key)
    assert found is not None
    assert RolloutResult.of_record(found) == made
    assert set(world.column(again, "worker")) == {"w1"}
    unmarked = engine.generate(dataclasses.replace(first, attempt=4, marked=False))
    assert set(world.column(unmarked, "attempt")) == {4}


def test_a_seeded_sample_does_not_depend_on_its_company(
    engine: RolloutEngine, world: World
) -> None:
    prompts = world.prompts()
    whole = engine.generate(world.request(prompts, SHORT))
    tokens = dict(
        zip(world.column(whole, "sample_id"), world.column(whole, "response_ids"), strict=True)
    )
    assert len({tuple(row) for row in tokens.values()}) == 12, "samples share their noise"
    for rows in ([3, 1], [0], [2]):
        shard = engine.generate(world.request(prompts.take(rows), SHORT))
        for sample, row in zip(
            world.column(shard, "sample_id"), world.column(shard, "response_ids"), strict=True
        ):
            assert row == tokens[sample]
    later = engine.generate(world.request(prompts, SHORT, step=5))
    assert world.column(later, "response_ids") != world.column(whole, "response_ids")


def test_without_a_seed_samples_differ(engine: RolloutEngine, world: World) -> None:
    sampling = Sampling(n=4, max_new_tokens=24)
    first, second = (
        engine.generate(world.request(world.prompts((6,)), sampling)) for _ in range(2)
    )
    drawn = [world.column(result, "response_ids") for result in (first, second)]
    assert drawn[0] != drawn[1]
    # Answers of a token or two may be the same by chance; of four tokens once in 10^7 pairs.
    long = [tuple(row) for rows in drawn for row in rows if len(row) >= 4]
    assert len(long) >= 2 and len(set(long)) == len(long)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_a_greedy_completion_takes_the_lowest_id_of_the_likeliest(
    engine: RolloutEngine, world: World, temperature: float
) -> None:
    """The words of this version come in pairs with the same logit, so each token is a tie."""
    tensors = dict(world.policies[0].state_dict())
    shared = tensors["model.embed_tokens.weight"]
    head = shared.clone()
    head[1::2] = head[:-1:2]
    engine.sync(publish(world.store, RUN, 40, (tensors | {"lm_head.weight": head}).items(), {}))
    greedy = Sampling(n=2, max_new_tokens=24, temperature=temperature, top_k=1, ignore_eos=True)
    first, *others = (
        engine.generate(world.request(world.prompts(), sampling))
        for sampling in (greedy, greedy, dataclasses.replace(greedy, seed=5))
    )
    answers = world.column(first, "response_ids")
    assert [world.column(other, "response_ids") for other in others] == [answers, answers]
    assert {number for row in world.column(first, "rollout_logprobs") for number in row} == {0.0}
    for prompt, answer in zip(world.column(first, "prompt_ids"), answers, strict=True):
        assert all(token % 2 == 0 for token in answer)
        parameters = tensors | {"lm_head.weight": head, "model.embed_tokens.weight": shared}
        with torch.no_grad():
            logits = torch.func.functional_call(
                world.policies[0], parameters, (torch.tensor([prompt + answer]),), tie_weights=False
            ).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        torch.testing.assert_close(chosen, logits.max(1).values, atol=1e-3, rtol=0)


SAMPLED = {
    "plain": Sampling(n=3, max_new_tokens=24, seed=5),
    "cold": Sampling(n=3, max_new_tokens=24, seed=5, temperature=0.6),
    "top-k": Sampling(n=3, max_new_tokens=24, seed=5, temperature=1.5, top_k=20),
    "top-p": Sampling(n=3, max_new_tokens=24, seed=5, temperature=0.8, top_p=0.7),
    "min-p": Sampling(n=3, max_new_tokens=24, seed=5, temperature=1.3, min_p=0.2),
}
DRAWN = [(True, "plain"), (True, "top-p"), (False, "top-k")]  # in the quick suite
SAMPLINGS = pytest.mark.parametrize("sampling", SAMPLED.values(), ids=SAMPLED)


@SAMPLINGS
def test_logprobs_are_those_of_the_sampling_distribution(
    engine: RolloutEngine, world: World, sampling: Sampling
) -> None:
    result = engine.generate(world.request(world.prompts(), sampling))
    for prompt, response, logprobs in zip(
        world.column(result, "prompt_ids"),
        world.column(result, "response_ids"),
        world.column(result, "rollout_logprobs"),
        strict=True,
    ):
        expected = world.logprobs(0, prompt, response, sampling)
        np.testing.assert_allclose(logprobs, expected, atol=2e-4)


@pytest.mark.parametrize(
    ("sampling", "seeded"),
    [
        pytest.param(
            sampling,
            seeded,
            id=f"{'' if seeded else 'un'}seeded-{name}",
            marks=[] if (seeded, name) in DRAWN else pytest.mark.slow,
        )
        for name, sampling in SAMPLED.items()
        for seeded in (True, False)
    ],
)
def test_tokens_are_drawn_from_that_distribution(
    engine: RolloutEngine, world: World, sampling: Sampling, seeded: bool
) -> None:
    """The randomised probability integral transform of the tokens is even in [0, 1].

    The Kolmogorov-Smirnov statistic of evenly drawn numbers is above 2.2 once in 8,000 times.
    """
    many = dataclasses.replace(sampling, n=40, seed=5 if seeded else None)
    engine.sync(world.weights[1])
    result = engine.generate(world.request(world.prompts(), many))
    dice, places = np.random.default_rng(0), []
    for prompt, response in zip(
        world.column(result, "prompt_ids"), world.column(result, "response_ids"), strict=True
    ):
        logs = world.distribution(1, prompt, response, many).double()
        own = logs.gather(1, torch.tensor(response)[:, None])
        likelier = (logs.exp() * (logs > own)).sum(1)
        places += (
            likelier + torch.from_numpy(dice.random(len(response))) * own[:, 0].exp()
        ).tolist()
    places.sort()
    count = len(places)
    assert count > 2000
    assert np.abs(places - np.arange(1, count + 1) / count).max() * count**0.5 < 2.2


@pytest.mark.vllm
def test_vllm_keeps_a_few_bytes_for_each_drawn_token(
    built: Callable[[str], RolloutEngine], world: World
) -> None:
    """An array in place of its dicts, which it keeps for a request with stop strings."""
    engine = built("vllm")
    if engine.version != 0:
        engine.sync(world.weights[0])
    plain = Sampling(n=2, max_new_tokens=40, seed=7, ignore_eos=True)
    drawn, with_dicts = (
        engine.generate(world.request(world.prompts(), sampling))
        for sampling in (plain, dataclasses.replace(plain, stop=("never drawn",)))
    )
    assert drawn is not None and with_dicts is not None
    for column in ("response_ids", "rollout_logprobs"):
        assert world.column(drawn, column) == world.column(with_dicts, column)
    from vllm.v1.engine import logprobs

    from engines.rollout.vllm_logprobs import DrawnLogprobs

    kept = logprobs.create_sample_logprobs(True)
    assert isinstance(kept, DrawnLogprobs)
    for _ in range(1000):
        logprobs.append_logprobs_for_next_position(kept, [7], [-1.5], iter([None]), 3, 0)
    assert (len(kept), len(kept[-3:]), kept.drawn.itemsize) == (1000, 3, 4)
    assert not isinstance(logprobs.create_sample_logprobs(False), DrawnLogprobs)


def test_score_is_a_plain_forward_pass(engine: RolloutEngine, world: World) -> None:
    sequences, starts = [[5, 6, 7, 8, 9], [40, 30, 20, 10, 50, 60, 70]], [2, 1]
    for version in (0, 1):
        engine.sync(world.weights[version])
        for scored, tokens, start in zip(
            engine.score(sequences, starts), sequences, starts, strict=True
        ):
            expected = world.logprobs(version, tokens[:start], tokens[start:], SHORT)
            np.testing.assert_allclose(scored, expected, atol=2e-4)


def test_stop_strings_end_a_completion_and_stay_in_it(engine: RolloutEngine, world: World) -> None:
    stop = ("a", "e", "i", "o", "u", "1", "2", "3", "4", "5", "xy")
    sampling = Sampling(n=4, max_new_tokens=60, seed=2, stop=stop, ignore_eos=True)
    result = engine.generate(world.request(world.prompts(), sampling))
    rows = world.column(result, "response_ids")
    texts = [world.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    reasons = world.column(result, "finish_reason")
    assert reasons.count("stop") > 8
    for text, reason in zip(texts, reasons, strict=True):
        assert text.endswith(stop) == (reason == "stop")
        assert not any(end in text[:-1] for end in stop)


def test_a_sequence_ends_at_the_engines_limit(engine: RolloutEngine, world: World) -> None:
    prompts = world.prompts((MAX_MODEL_LEN - 10,))
    result = engine.generate(world.request(prompts, LONG))
    assert [len(row) for row in world.column(result, "response_ids")] == [10, 10]
    assert world.column(result, "finish_reason") == ["length"] * 2
    with pytest.raises(ValueError, match=f"group 100 has {MAX_MODEL_LEN} tokens"):
        engine.generate(world.request(world.prompts((MAX_MODEL_LEN,)), LONG))


@pytest.mark.vllm
def test_vllm_has_turns_with_a_grammar_and_versions_from_their_trainer(
    built: Callable[[str], RolloutEngine], world: World
) -> None:
    """One case of each; test_grammars.py and test_weight_transfer.py have all of them."""
    engine = built("vllm")
    engine.sync(world.weights[0])
    test_grammars.test_they_are_drawn_among_the_words_that_the_grammar_leaves(
        engine, world, "json", "alone"
    )
    trainer = test_weight_transfer.Sending(engine)
    test_weight_transfer.test_the_same_version_as_by_the_store(engine, world, trainer, "ipc")
    trainer.close()


def test_a_sync_brings_the_new_policy(engine: RolloutEngine, world: World) -> None:
    request = world.request(world.prompts(), SHORT)
    before = world.column(engine.generate(request), "response_ids")
    report = engine.sync(world.weights[1])
    assert (report.version, report.digest) == (1, world.weights[1].digest)
    assert report.nbytes == world.weights[1].nbytes
    assert engine.version == engine.status().version == 1
    result = engine.generate(request)
    assert world.column(result, "response_ids") != before
    assert {tuple(spans[:2]) for spans in world.column(result, "weight_spans")} == {(1, 0)}
    prompt, response = (world.column(result, name)[4] for name in ("prompt_ids", "response_ids"))
    np.testing.assert_allclose(
        world.column(result, "rollout_logprobs")[4],
        world.logprobs(1, prompt, response, SHORT),
        atol=2e-4,
    )
    engine.sync(world.weights[0])
    assert world.column(engine.generate(request), "response_ids") == before


def test_a_tied_head_is_a_weight_of_its_own(engine: RolloutEngine, world: World) -> None:
    tensors = dict(world.policies[0].state_dict())
    shared = tensors["model.embed_tokens.weight"]
    assert torch.equal(tensors.pop("lm_head.weight"), shared)
    headless = publish(world.store, RUN, 20, tensors.items(), {})
    with pytest.raises(WeightMismatch, match=r"version 20 .* no tensor lm_head\.weight"):
        engine.sync(headless)
    assert engine.version == 0, "a version that does not fit is refused before it is loaded"
    turned = {**tensors, "lm_head.weight": shared.flip(0)}
    engine.sync(publish(world.store, RUN, 21, turned.items(), {}))
    vocabulary = len(shared)
    plain = world.logprobs(0, [5, 6], [7, 8], SHORT)
    (straight,) = engine.score([[5, 6, vocabulary - 1 - 7]], [2])
    assert straight[0] == pytest.approx(plain[0], abs=2e-4)


def test_a_version_of_another_shape_is_refused(engine: RolloutEngine, world: World) -> None:
    tensors = dict(world.policies[0].state_dict())
    tensors["model.norm.weight"] = torch.ones(7)
    with pytest.raises(WeightMismatch, match=r"model\.norm\.weight .* shape \(7,\)"):
        engine.sync(publish(world.store, RUN, 22, tensors.items(), {}))


def test_a_damaged_version_is_named_and_not_sampled_from(
    engine: RolloutEngine, world: World
) -> None:
    version = 30 if engine.status().pids else 31
    ref = world.publish(version, world.policies[1])
    name = "model.layers.1.mlp.up_proj.weight"
    entry = open_manifest(world.store, ref).tensors[name]
    key = f"{ref.key}/{entry.file}"
    data = bytearray(world.store.read(key))
    data[entry.start + 3] ^= 1
    world.store.write(key, bytes(data))
    with pytest.raises(ObjectDamaged, match=name.replace(".", r"\.")):
        engine.sync(ref)
    assert engine.version is None
    assert engine.status().state == "no weights"
    with pytest.raises(NoWeights, match="sync first"):
        engine.generate(world.request(world.prompts(), SHORT))
    engine.sync(world.weights[0])
    prompt, response = [5, 6, 7], [8, 9, 10]
    (scored,) = engine.score([prompt + response], [3])
    np.testing.assert_allclose(scored, world.logprobs(0, prompt, response, SHORT), atol=2e-4)


def test_pause_holds_and_resume_goes_on(
    engine: RolloutEngine, world: World, threads: ThreadPoolExecutor
) -> None:
    request = world.request(world.prompts(), LONG)
    undisturbed = world.column(engine.generate(request), "response_ids")
    shard = begun(engine, threads, request)
    engine.pause()
    held = engine.status()
    time.sleep(0.3)
    assert held.state == engine.status().state == "paused"
    assert held.running + held.waiting == 8
    assert engine.status().tokens == held.tokens
    engine.resume()
    assert world.column(shard.result(60), "response_ids") == undisturbed


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_sync_in_the_middle_of_a_shard(
    engine: RolloutEngine, world: World, threads: ThreadPoolExecutor, mode: str
) -> None:
    shard = begun(engine, threads, world.request(world.prompts(), LONG))
    engine.sync(world.weights[1], mode=mode)
    result = shard.result(60)
    assert set(world.column(result, "weights_digest")) == {world.weights[1].digest}
    for prompt, response, logprobs, spans in zip(
        world.column(result, "prompt_ids"),
        world.column(result, "response_ids"),
        world.column(result, "rollout_logprobs"),
        world.column(result, "weight_spans"),
        strict=True,
    ):
        (old, first, change), (new, again, last) = spans[:3], spans[3:]
        assert (old, first, new, last) == (0, 0, 1, 200)
        assert change == again
        expected = world.logprobs(0, prompt, response[:change], LONG)
        np.testing.assert_allclose(logprobs[:change], expected, atol=2e-4)
        expected = world.logprobs(1, prompt, response, LONG)[change:]
        close = np.allclose(logprobs[change:], expected, atol=2e-4)
        assert close == (mode == "recompute"), "keep goes on with the old keys and values"


def test_an_idle_sync_lets_shards_finish(
    engine: RolloutEngine, world: World, threads: ThreadPoolExecutor
) -> None:
    shard = begun(engine, threads, world.request(world.prompts(), LONG))
    engine.sync(world.weights[1], mode="idle")
    assert set(world.column(shard.result(60), "weights_digest")) == {world.weights[0].digest}
    assert engine.version == 1


def test_an_idle_sync_of_a_paused_engine_is_refused(
    engine: RolloutEngine, world: World, threads: ThreadPoolExecutor
) -> None:
    shard = begun(engine, threads, world.request(world.prompts(), LONG))
    engine.pause()
    with pytest.raises(RuntimeError, match="Resume it, or sync with mode = keep"):
        engine.sync(world.weights[1])
    engine.resume()
    assert shard.result(60).stats.version == 0


def test_two_shards_in_flight(
    engine: RolloutEngine, world: World, threads: ThreadPoolExecutor
) -> None:
    prompts = world.prompts()
    requests = [world.request(prompts.take(rows), LONG) for rows in ([0, 1], [2, 3])]
    alone = [world.column(engine.generate(request), "response_ids") for request in requests]
    begun = engine.status().tokens
    engine.pause()
    shards = [threads.submit(engine.generate, request) for request in requests]
    until(
        lambda: engine.status().running + engine.status().waiting >= 2, "two shards being in flight"
    )
    engine.resume()
    assert [world.column(shard.result(60), "response_ids") for shard in shards] == alone
    assert engine.status().tokens - begun == 8 * 200


def test_cancel_ends_the_shards_in_flight_only(
    engine: RolloutEngine, world: World, threads: ThreadPoolExecutor
) -> None:
    request = world.request(world.prompts(), LONG)
    shard = begun(engine, threads, request)
    assert engine.cancel() == 1
    with pytest.raises(RolloutCancelled):
        shard.result(10)
    until(lambda: engine.status().running + engine.status().waiting == 0, "an empty engine", 10)
    assert engine.cancel() == 0
    assert len(engine.generate(request).ref) == 8


def test_a_closed_engine_is_gone(world: World, threads: ThreadPoolExecutor) -> None:
    engine = world.build("transformers")
    engine.sync(world.weights[0])
    shard = begun(engine, threads, world.request(world.prompts(), LONG))
    engine.close()
    engine.close()
    with pytest.raises(RolloutCancelled):
        shard.result(10)
    assert engine.status().state == "closed"
    with pytest.raises(EngineDead, match="closed"):
        engine.generate(world.request(world.prompts(), SHORT))
