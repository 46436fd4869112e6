"""The words that top_p, top_k and min_p leave of each token, as the transformers engine gives them.

vLLM gives them on a GPU alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from engines.rollout.contract import NO_MASK_ON_CPU, RolloutResult, Sampling
from engines.rollout.engine import RolloutEngine
from storage.batches.sampling_mask import COUNTS, WORDS, mask_columns, read_masks
from storage.batches.writing import write_batch
from tests.contract.rollout.test_turns import SAID, TURN, answered
from tests.contract.rollout.world import World

CUT = {
    "top-p": {"top_p": 0.7},
    "top-k": {"top_k": 9},
    "min-p": {"min_p": 0.3},
    "all": {"top_p": 0.8, "top_k": 30, "min_p": 0.05},
}


@pytest.fixture
def engine(built: Callable[[str], RolloutEngine], world: World) -> RolloutEngine:
    found = built("transformers")
    if found.version != 0:
        found.sync(world.weights[0])
    return found


def check_words(world: World, result: RolloutResult, sampling: Sampling) -> None:
    """Those of each token of the policy are the ones that plain transformers leaves."""
    authors = [None] * len(result.ref)
    if "author" in result.ref.names:
        authors = world.column(result, "author")
    for prompt, ids, by, mask in zip(
        world.column(result, "prompt_ids"),
        world.column(result, "response_ids"),
        authors,
        read_masks(world.store, result.ref),
        strict=True,
    ):
        mask.check_holds(np.array(ids))
        left = world.distribution(0, prompt, ids, sampling).isfinite().numpy()
        for place, number in enumerate(mask.numbers.tolist()):
            if by is not None and by[place] != 1:
                assert not number, "nobody drew it"
            else:
                every = np.arange(left.shape[1])
                words = mask.sets[number - 1].have(every) if number else every >= 0
                assert words.tolist() == left[place].tolist()


@pytest.mark.parametrize("cut", CUT.values(), ids=CUT)
def test_they_are_those_of_the_distribution(
    engine: RolloutEngine, world: World, cut: dict[str, float]
) -> None:
    sampling = Sampling(n=3, max_new_tokens=16, seed=5, sampling_mask=True, **cut)  # type: ignore[arg-type]
    result = engine.generate(world.request(world.prompts(), sampling))
    check_words(world, result, sampling)


def test_they_go_on_over_turns(engine: RolloutEngine, world: World) -> None:
    sampling = Sampling(
        n=2,
        max_new_tokens=40,
        max_turn_tokens=TURN,
        seed=5,
        ignore_eos=True,
        top_p=0.8,
        sampling_mask=True,
    )
    request = world.request(world.prompts((5, 9)), sampling)
    result = engine.generate(request)
    ref = answered(world, result, f"{request.out_key}.1")
    lengths = [TURN + len(SAID)] * 4
    masks = mask_columns(read_masks(world.store, result.ref), lengths)
    ref = ref.with_columns(write_batch(world.store, f"{request.out_key}.masks", masks))
    result = engine.generate(
        dataclasses.replace(request, begun=ref, out_key=f"{request.out_key}.2")
    )
    assert len(world.column(result, "response_ids")[0]) == 2 * TURN + len(SAID)
    check_words(world, result, sampling)


def test_what_was_begun_without_them_does_not_go_on_with_them(
    engine: RolloutEngine, world: World
) -> None:
    sampling = Sampling(n=2, max_new_tokens=40, max_turn_tokens=TURN, seed=5, ignore_eos=True)
    request = world.request(world.prompts((5, 9)), dataclasses.replace(sampling, top_p=0.8))
    result = engine.generate(request)
    assert not {COUNTS, WORDS} & set(result.ref.names), "nobody asked for them"
    again = dataclasses.replace(
        request,
        begun=answered(world, result, f"{request.out_key}.1"),
        out_key=f"{request.out_key}.2",
        sampling=dataclasses.replace(request.sampling, sampling_mask=True),
    )
    with pytest.raises(ValueError, match="samples that were begun without it"):
        engine.generate(again)


def test_what_was_begun_with_them_goes_on_without_them(engine: RolloutEngine, world: World) -> None:
    """As in a fork that does not ask for them: words of a part of a sample's tokens are none."""
    sampling = Sampling(
        n=2,
        max_new_tokens=40,
        max_turn_tokens=TURN,
        seed=5,
        ignore_eos=True,
        top_p=0.8,
        sampling_mask=True,
    )
    request = world.request(world.prompts((5, 9)), sampling)
    result = engine.generate(request)
    assert {COUNTS, WORDS} <= set(result.ref.names)
    masks = mask_columns(read_masks(world.store, result.ref), [TURN + len(SAID)] * 4)
    begun = answered(world, result, f"{request.out_key}.1").with_columns(
        write_batch(world.store, f"{request.out_key}.masks", masks)
    )
    again = dataclasses.replace(
        request,
        begun=begun,
        out_key=f"{request.out_key}.2",
        sampling=dataclasses.replace(sampling, sampling_mask=False),
    )
    assert not {COUNTS, WORDS} & set(engine.generate(again).ref.names)


def test_what_does_not_train_has_none_and_older_shards_keep_their_identity() -> None:
    plain = Sampling(n=2, max_new_tokens=9, top_p=0.9)
    masked = dataclasses.replace(plain, sampling_mask=True, min_p=0.1)
    assert not {"sampling_mask", "min_p"} & set(plain.identity)
    assert {"sampling_mask", "min_p"} <= set(masked.identity)
    assert masked.as_greedy == plain.as_greedy
    assert not masked.of_nothing_trained.sampling_mask


@pytest.mark.vllm
def test_vllm_on_a_cpu_says_so(world: World) -> None:
    spec = world.spec("vllm")
    rollout = spec.rollout.model_copy(update={"sampling_mask": True, "top_k": 50})
    from engines.rollout.vllm_engine import VllmEngine

    with pytest.raises(ValueError, match=NO_MASK_ON_CPU.split(",")[0]):
        VllmEngine(spec.model_copy(update={"rollout": rollout}))


@pytest.mark.vllm
def test_what_vllm_is_asked_for_and_gives(world: World) -> None:
    pytest.importorskip("vllm")
    from vllm.outputs import CompletionOutput, RequestOutput, SamplingMask, WeightVersionSpan

    from engines.rollout.samples import NOTHING
    from engines.rollout.vllm_arguments import (
        completion,
        engine_arguments,
        sampling_params,
        scoring_params,
    )

    spec = world.spec("vllm")
    rollout = spec.rollout.model_copy(update={"sampling_mask": True, "top_k": 50})
    masked = spec.model_copy(update={"rollout": rollout})
    assert engine_arguments(masked, world.directory).return_sampling_mask
    assert not engine_arguments(spec, world.directory).return_sampling_mask

    sampling = Sampling(n=1, max_new_tokens=9, top_k=50, min_p=0.1, sampling_mask=True)
    asked = sampling_params(sampling, [2], 1, NOTHING, masks=True)
    assert (asked.top_k, asked.min_p, asked.temperature) == (50, 0.1, 1.0)
    greedy = sampling_params(sampling.as_greedy, [2], 1, NOTHING, masks=True)
    assert (greedy.top_k, greedy.min_p, greedy.temperature) == (1, 0.0, 1.0)
    assert sampling_params(sampling.as_greedy, [2], 1, NOTHING).temperature == 0
    assert scoring_params(0, masks=True).top_k == 1
    assert scoring_params(0).top_k == 0

    drawn = CompletionOutput(
        index=0,
        text="",
        token_ids=[7, 3],
        cumulative_logprob=None,
        logprobs=[{7: _logprob(-0.5)}, {3: _logprob(-0.25)}],
        finish_reason="length",
        sampling_mask=SamplingMask([[9, 7], [3, 4, 8]]),
        weight_versions=[WeightVersionSpan("4", 0, 2)],
    )
    answer = RequestOutput("r", None, [1, 2], None, [drawn], finished=True)
    found = completion(answer, sampling)
    assert found.sampling_mask is not None
    counts, words = found.sampling_mask.columns()
    assert counts.tolist() == [2, 3] and words.tolist() == [7, 9, 3, 4, 8]
    assert (
        completion(answer, dataclasses.replace(sampling, sampling_mask=False)).sampling_mask is None
    )
    drawn.sampling_mask = SamplingMask([[9, 7]])
    with pytest.raises(ValueError, match="words that 1 tokens were drawn from, not 2"):
        completion(answer, sampling)


def _logprob(value: float) -> object:
    from vllm.logprobs import Logprob

    return Logprob(value)
