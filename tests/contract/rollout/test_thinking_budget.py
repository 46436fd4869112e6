"""Thoughts that a budget ends: words that the policy did not write, on both engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from engines.models.checkpoints import character_tokenizer
from engines.rollout.contract import RolloutRequest, Sampling
from engines.rollout.engine import RolloutEngine
from engines.rollout.samples import NOTHING, Completion, PromptTokens
from engines.rollout.thinking_budget import ThinkingBudget
from storage.batches.columns import UNFINISHED, WAITING, Author, SampleStatus
from storage.batches.writing import write_batch
from tests.contract.rollout.world import World

WORDS = character_tokenizer()
BUDGET, MOST = 6, 20


def sampling(start: str, end: str, **changes: object) -> Sampling:
    found = Sampling(
        n=4,
        max_new_tokens=MOST,
        thinking_budget=BUDGET,
        thinking_words=(start, end, f"{end}!"),
        seed=5,
        ignore_eos=True,
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def test_a_thought_is_ended_at_its_budget(engine: RolloutEngine, world: World) -> None:
    prompts = world.prompts((5, 9))
    first = WORDS.decode(prompts.fetch_list(world.store, "prompt_ids")[0].tolist())
    start = first[0]
    end = next(one for one in "~^%$" if one not in first)
    asked = sampling(start, end)
    request = world.request(prompts, asked)
    result = engine.generate(request)
    cut, closing = 0, WORDS.encode(f"{end}!", add_special_tokens=False)
    for prompt, ids, logprobs, authors, mask, spans in zip(
        *(
            world.column(result, name)
            for name in (
                *("prompt_ids", "response_ids", "rollout_logprobs", "author", "response_mask"),
                "weight_spans",
            )
        ),
        strict=True,
    ):
        text = WORDS.decode([*prompt, *ids[:BUDGET]])
        thinks = text.rfind(start) > text.rfind(end)
        cut += thinks
        assert len(ids) == MOST
        wrote = [Author.POLICY] * MOST
        if thinks:
            assert ids[BUDGET : BUDGET + 2] == closing
            wrote[BUDGET : BUDGET + 2] = [Author.BUDGET] * 2
        assert authors == wrote
        assert mask == [int(one == Author.POLICY) for one in wrote]
        assert spans == ([0, 0, BUDGET, 0, BUDGET + 2, MOST] if thinks else [0, 0, MOST])
        expected = world.logprobs(0, prompt, ids, asked)
        for place, author in enumerate(wrote):
            wanted = expected[place] if author == Author.POLICY else 0.0
            assert logprobs[place] == pytest.approx(wanted, abs=2e-4)
    assert cut >= 3, "the first prompt begins a thought"
    assert result.stats.tokens == 8 * MOST
    again = engine.generate(replace(request, out_key=f"{request.out_key}.again"))
    assert world.column(again, "response_ids") == world.column(result, "response_ids")


def test_a_thought_that_was_begun_goes_on_to_its_budget(
    engine: RolloutEngine, world: World
) -> None:
    """As a step hands it on: at the budget, beyond it with the words, and before it."""
    prompts = world.prompts((5,))
    start = WORDS.decode(prompts.fetch_list(world.store, "prompt_ids")[0].tolist())[0]
    asked = sampling(start, "~")
    closing = WORDS.encode("~!", add_special_tokens=False)
    request = world.request(prompts, asked)
    whole = engine.generate(request)
    ids = world.column(whole, "response_ids")
    authors = world.column(whole, "author")
    lengths = [BUDGET, BUDGET + 4, 3, 0]
    columns: dict[str, object] = {
        "response_ids": [np.array(one[:n], np.int32) for one, n in zip(ids, lengths, strict=True)],
        "rollout_logprobs": [np.zeros(n, np.float32) for n in lengths],
        "author": [np.array(one[:n], np.uint8) for one, n in zip(authors, lengths, strict=True)],
        "weight_spans": [np.array([0, 0, n] if n else [], np.int64) for n in lengths],
        "finish_reason": [UNFINISHED] * 4,
        "status": np.full(4, SampleStatus.UNFINISHED, np.int64),
    }
    kept = [name for name in whole.ref.names if name not in columns]
    begun = whole.ref[kept].with_columns(
        write_batch(world.store, f"{request.out_key}.begun", columns)
    )
    went = engine.generate(replace(request, begun=begun, out_key=f"{request.out_key}.on"))
    for row, n in enumerate(lengths):
        found = world.column(went, "response_ids")[row]
        assert found[:n] == ids[row][:n] and len(found) == MOST
        wrote = world.column(went, "author")[row]
        ended = [place for place, one in enumerate(wrote) if one == Author.BUDGET]
        thought = WORDS.decode(found[:BUDGET])
        if thought.rfind(start) >= thought.rfind("~"):
            assert ended == [BUDGET, BUDGET + 1] and found[BUDGET : BUDGET + 2] == closing


def bound(asked: Sampling, prompt: str) -> ThinkingBudget:
    request = RolloutRequest(prompts=None, sampling=asked, out_key="k", step=1, shard=1)  # type: ignore[arg-type]
    return ThinkingBudget(
        request=request,
        prompts=PromptTokens(
            tokens=[WORDS.encode(prompt)], numbers=[0], samples=[(0, k) for k in range(asked.n)]
        ),
        max_model_len=64,
        encode=lambda text: WORDS.encode(text, add_special_tokens=False),
        decode=WORDS.decode,
    )


def test_what_waits_in_a_round_is_saved_as_what_goes_on() -> None:
    budget = bound(sampling("<", ">", n=5), "<")
    drawn = replace(NOTHING, tokens=[4] * BUDGET, logprobs=[-1.0] * BUDGET, spans=[(0, 0, BUDGET)])
    begun = [drawn, NOTHING, replace(drawn, finish_reason="stop"), NOTHING, NOTHING]
    begun[4] = replace(NOTHING, finish_reason=WAITING)  # for another player
    rounds: list[list[str]] = []

    def sample(request: RolloutRequest, rows: Sequence[Completion]) -> list[Completion]:
        rounds.append([one.finish_reason for one in rows])
        most = request.sampling.max_turn_tokens or MOST
        found = [
            one
            if one.ended
            else replace(
                one,
                tokens=one.tokens + [4] * (most - len(one.tokens)),
                logprobs=one.logprobs + [-1.0] * (most - len(one.tokens)),
                finish_reason="length",
            )
            for one in rows
        ]
        stands = budget.so_far(begun, found)
        reasons = [one.finish_reason for one in stands]
        ended = UNFINISHED if most == BUDGET else "length"
        assert reasons == [ended, ended, "stop", ended, WAITING]
        return found

    result = budget.sampled(begun, sample)
    assert rounds == [
        [WAITING, UNFINISHED, "stop", UNFINISHED, WAITING],
        [UNFINISHED, UNFINISHED, "stop", UNFINISHED, WAITING],
    ]
    closing = WORDS.encode(">!", add_special_tokens=False)
    assert [one.tokens[BUDGET : BUDGET + 2] == closing for one in result] == [
        *(True, True, False, True, False)
    ]
    assert {len(one.tokens) for one in result[:2]} == {MOST}


def test_words_that_do_not_fit_end_the_completion() -> None:
    budget = bound(sampling("<", ">", n=1, max_new_tokens=BUDGET + 2), "<")
    drawn = replace(NOTHING, tokens=[4] * BUDGET, logprobs=[-1.0] * BUDGET)
    (found,) = budget.sampled([drawn], lambda request, rows: list(rows))
    assert (found.finish_reason, len(found.tokens)) == ("length", BUDGET)


def test_a_thought_that_has_ended_is_let_be() -> None:
    budget = bound(sampling("<", ">", n=1), "<")
    tokens = WORDS.encode("ab>cde", add_special_tokens=False)
    drawn = replace(NOTHING, tokens=tokens, logprobs=[-1.0] * BUDGET)
    (found,) = budget.sampled([drawn], lambda request, rows: list(rows))
    assert found == drawn
