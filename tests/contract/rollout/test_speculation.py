"""Proposed tokens change neither the distribution that is drawn from nor the log-probs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from configs.rollout import NgramSpeculation, RolloutConfig
from engines.rollout.contract import Sampling
from engines.rollout.engine import RolloutEngine
from engines.rollout.vllm_arguments import speculation
from engines.rollout.vllm_engine import VllmEngine
from storage.batches.writing import write_batch
from tests.contract.rollout.world import World

pytest.importorskip("vllm")

# An engine of its own, which takes half a minute to start.
pytestmark = [pytest.mark.vllm, pytest.mark.slow]
# Chance that a right engine fails a test of frequencies, whose seeds do not change, as a normal
# distribution's quantile.
LEVEL, QUANTILE = 1e-4, 3.719
# The world's model likes to repeat the last token: after these a proposal is often right.
PROMPT = [5, 6, 7, 7, 7, 7, 7, 7]
DRAWS = 3000


@pytest.fixture
def engine(built: Callable[[str], RolloutEngine], world: World) -> VllmEngine:
    found = built("vllm-ngram")
    assert isinstance(found, VllmEngine)
    if found.version != 0:
        found.sync(world.weights[0])
    return found


def counted(engine: VllmEngine) -> tuple[float, float]:
    """Tokens proposed, and of these accepted, since the engine began."""
    values = {one.name: one.value for each in engine.metrics() for one in each.samples}
    proposed, accepted = (
        values[f"vllm:spec_decode_num_{one}_tokens_total"] for one in ("draft", "accepted")
    )
    return proposed, accepted


def drawn(engine: VllmEngine, world: World, sampling: Sampling) -> list[tuple[int, ...]]:
    """Responses to PROMPT; each one's log-probs are checked."""
    columns = {
        "prompt_ids": [np.array(PROMPT)],
        "group_id": np.array([0]),
        "prompt_row": np.array([0]),
    }
    key = f"prompts/speculation-{hash(sampling)}.safetensors"
    result = engine.generate(world.request(write_batch(world.store, key, columns), sampling))
    responses = world.column(result, "response_ids")
    wanted: dict[tuple[int, ...], list[float]] = {}
    for response, logprobs in zip(responses, world.column(result, "rollout_logprobs"), strict=True):
        one = tuple(response)
        if one not in wanted:
            wanted[one] = world.logprobs(0, PROMPT, response, sampling)
        np.testing.assert_allclose(logprobs, wanted[one], atol=2e-4)
    return [tuple(response) for response in responses]


def sequences(
    world: World, sampling: Sampling, begun: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every response of the full length with its probability under version 0."""
    if len(begun) == sampling.max_new_tokens:
        yield begun, 1.0
        return
    words = world.distribution(0, PROMPT, [*begun, 0], sampling)[-1].exp()
    for word in words.nonzero()[:, 0].tolist():
        for whole, chance in sequences(world, sampling, (*begun, word)):
            yield whole, float(words[word]) * chance


def check_frequencies(found: Counter[object], chances: dict[object, float]) -> None:
    """Pearson's test at LEVEL; what is expected fewer than five times is counted together.

    The quantile of chi-square is Wilson and Hilferty's (1931), within 1 % of it here.
    """
    draws = sum(found.values())
    assert set(found) <= set(chances), "something of probability 0 was drawn"
    often = [one for one, chance in chances.items() if chance * draws >= 5]
    rest = 1 - sum(chances[one] for one in often)
    observed = [float(found[one]) for one in often]
    wanted = [chances[one] * draws for one in often]
    if rest * draws >= 5:
        observed.append(draws - sum(observed))
        wanted.append(rest * draws)
    statistic = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
    freedom = len(wanted) - 1
    part = 2 / (9 * freedom)
    most = freedom * (1 - part + QUANTILE * part**0.5) ** 3
    assert statistic < most, (
        f"chi-square {statistic:.1f} with {freedom} degrees, at most {most:.1f}"
    )


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sequences_are_as_frequent_as_without(
    engine: VllmEngine, world: World, temperature: float
) -> None:
    """Of four tokens, three words each: 81 sequences; some proposals are taken, others not."""
    before = counted(engine)
    sampling = Sampling(
        n=DRAWS, max_new_tokens=4, top_k=3, temperature=temperature, seed=11, ignore_eos=True
    )
    found = Counter[object](drawn(engine, world, sampling))
    check_frequencies(found, dict(sequences(world, sampling)))
    proposed, accepted = (now - then for now, then in zip(counted(engine), before, strict=True))
    assert DRAWS / 10 < accepted < proposed


def test_words_are_as_frequent_as_without(engine: VllmEngine, world: World) -> None:
    """The second and third of all words, which a proposal or its refusal gives."""
    sampling = Sampling(n=DRAWS, max_new_tokens=2, temperature=0.4, seed=12, ignore_eos=True)
    chances: dict[object, float] = {}
    for (_, second), chance in sequences(world, sampling):
        chances[second] = chances.get(second, 0.0) + chance
    found = Counter[object](second for _, second in drawn(engine, world, sampling))
    check_frequencies(found, chances)


def test_the_likeliest_words_are_those_without(
    engine: VllmEngine, world: World, built: Callable[[str], RolloutEngine]
) -> None:
    plain = built("transformers")
    plain.sync(world.weights[0])
    sampling = Sampling(n=1, max_new_tokens=60, ignore_eos=True).as_greedy
    prompts = world.prompts()
    answers = [
        world.column(one.generate(world.request(prompts, sampling)), "response_ids")
        for one in (engine, plain)
    ]
    assert answers[0] == answers[1]


def test_arguments_for_vllm() -> None:
    assert speculation(RolloutConfig()) == {}
    proposed = NgramSpeculation(tokens=5, longest_match=6, shortest_match=3)
    assert speculation(RolloutConfig(speculative=proposed)) == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 6,
        "prompt_lookup_min": 3,
    }
    given = {"method": "mtp", "num_speculative_tokens": 1}
    found = speculation(RolloutConfig(engine_args={"speculative_config": given}))
    assert found == {**given, "draft_load_config": {"load_format": "auto"}}
    with pytest.raises(ValueError, match="Set it to 2 or less"):
        NgramSpeculation(longest_match=2, shortest_match=3)
