"""Turns whose text has a grammar, as both engines sample them.

The oracle asks of each word of the vocabulary whether the text so far with it can still become one of
the grammar, by a regular expression that is matched in part, and not by the library.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import numpy as np
import pytest
import regex
import torch

from engines.episodes.turn_grammars import call_form, of_schema
from engines.models.checkpoints import end_token_ids
from engines.models.grammars import Grammars, TurnGrammar
from engines.rollout.contract import RolloutRequest, RolloutResult, Sampling
from engines.rollout.engine import RolloutEngine
from engines.rollout.partial import PartialSamples
from storage.batches.columns import GRAMMAR, UNFINISHED, Author, SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.sampling_mask import COUNTS, WORDS, SamplingMask, mask_columns, read_masks
from storage.batches.writing import write_batch
from tests.contract.rollout.world import World, begun, until

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 12, "a"]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
_W = r"[ \t\n\r]{0,32}"
JSON = rf'\{{{_W}"ok"{_W}:{_W}(?:true|false){_W},{_W}"n"{_W}:{_W}(?:1|12|"a"){_W}\}}'
THOUGHT = r"(?:(?!</think>)(?s:.))*</think>[ \n]{0,4}"
CALL = rf'<tool_call>\{{"name": "f", "arguments": {JSON}\}}</tool_call>'
JSON_ANSWER = of_schema(SCHEMA)
CALLS = {
    "type": "tags_with_separator",
    "tags": [
        {
            "type": "tag",
            "begin": '<tool_call>{"name": "f", "arguments": ',
            "content": JSON_ANSWER,
            "end": "}</tool_call>",
        }
    ],
    "separator": "\n",
    "at_least_one": True,
    "stop_after_first": False,
}
GRAMMARS = {
    "json": (TurnGrammar(answer=JSON_ANSWER), JSON),
    "calls": (TurnGrammar(answer=CALLS, calls="yes"), rf"{CALL}(?:\n{CALL})*"),
    "a thought that is open": (TurnGrammar(answer=JSON_ANSWER, thought="open"), THOUGHT + JSON),
    "a thought or none": (
        TurnGrammar(answer=JSON_ANSWER, thought="may"),
        f"(?:<think>{THOUGHT})?{JSON}",
    ),
}
MOST = 70
SAMPLING = Sampling(n=2, max_new_tokens=MOST, seed=5, sampling_mask=True)
CUT = {
    "alone": {},
    "temperature": {"temperature": 0.7},
    "all": {"temperature": 0.8, "top_p": 0.8, "top_k": 12, "min_p": 0.02},
}


def asked(world: World, grammar: TurnGrammar | None, lengths: tuple[int, ...] = (5,)) -> BatchRef:
    """Prompts, the last of which is for any text."""
    prompts = world.prompts((*lengths, 4))
    texts = ["" if grammar is None else grammar.to_json()] * len(lengths) + [""]
    written = write_batch(world.store, f"{next(world._keys)}.grammars", {GRAMMAR: texts})
    return prompts.with_columns(written)


def texts(world: World, ids: list[int]) -> str:
    return str(world.tokenizer.decode(ids, skip_special_tokens=True))


def left_by(world: World, pattern: str, ids: list[int], start: int = 0) -> torch.Tensor:
    """[R, V] the words that may come at each place of a turn."""
    whole, size = regex.compile(pattern), len(world.tokenizer)
    ends = {*end_token_ids(world.directory)}
    special = {n for n, one in world.tokenizer.added_tokens_decoder.items() if one.special}
    words = [texts(world, [word]) for word in range(size)]
    left = torch.zeros(len(ids), size, dtype=torch.bool)
    for place in range(start, len(ids)):
        before = texts(world, ids[start:place])
        for word in range(size):
            if word in ends:
                left[place, word] = whole.fullmatch(before) is not None
            elif word not in special:
                left[place, word] = whole.fullmatch(before + words[word], partial=True) is not None
    return left


def check(world: World, result: RolloutResult, sampling: Sampling, pattern: str) -> Counter[str]:
    """Words, log-probs and texts of samples are those of the oracle; how often each ended how."""
    ends: Counter[str] = Counter()
    columns = ("prompt_ids", "response_ids", "rollout_logprobs", "finish_reason")
    rows = zip(
        *(world.column(result, name) for name in columns),
        read_masks(world.store, result.ref),
        strict=True,
    )
    for number, (prompt, ids, logprobs, finish, mask) in enumerate(rows):
        guided = number < len(result.ref) - sampling.n
        left = left_by(world, pattern, ids) if guided else None
        wanted = world.distribution(0, prompt, ids, sampling, left)
        mask.check_holds(np.array(ids))
        every = np.arange(wanted.shape[1])
        for place, set_number in enumerate(mask.numbers.tolist()):
            kept = mask.sets[set_number - 1].have(every) if set_number else every >= 0
            assert kept.tolist() == wanted[place].isfinite().tolist(), texts(world, ids[:place])
        own = wanted.gather(1, torch.tensor(ids)[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, own, atol=1e-5)
        if guided:
            ends[finish] += 1
            assert (finish == "stop") == (regex.fullmatch(pattern, texts(world, ids)) is not None)
    return ends


@pytest.mark.parametrize(
    ("name", "cut"),
    [*((name, "alone") for name in GRAMMARS), ("json", "temperature"), ("json", "all")],
)
def test_they_are_drawn_among_the_words_that_the_grammar_leaves(
    engine: RolloutEngine, world: World, name: str, cut: str
) -> None:
    if cut == "all" and "vllm" in engine.status().name:
        pytest.skip("vLLM says on a GPU alone what top_p, top_k and min_p leave")
    grammar, pattern = GRAMMARS[name]
    sampling = dataclasses.replace(SAMPLING, **CUT[cut])  # type: ignore[arg-type]
    result = engine.generate(world.request(asked(world, grammar), sampling))
    ends = check(world, result, sampling, pattern)
    assert ends["stop"] or name != "json", "some of them end"
    for ids, finish in zip(
        *(world.column(result, one)[:2] for one in ("response_ids", "finish_reason")), strict=True
    ):
        if name == "json" and finish == "stop":
            jsonschema.validate(json.loads(texts(world, ids)), SCHEMA)


def test_recipes_stop_texts_and_going_on_do_not_end_them(
    engine: RolloutEngine, world: World
) -> None:
    grammar, pattern = GRAMMARS["json"]
    sampling = dataclasses.replace(SAMPLING, stop=("o", ":"), ignore_eos=True)
    result = engine.generate(world.request(asked(world, grammar), sampling))
    for ids, finish in zip(
        *(world.column(result, one)[:2] for one in ("response_ids", "finish_reason")), strict=True
    ):
        assert len(ids) == MOST or regex.fullmatch(pattern, texts(world, ids))
        assert finish == ("length" if len(ids) == MOST else "stop")


def test_the_likeliest_is_among_them(engine: RolloutEngine, world: World) -> None:
    grammar, pattern = GRAMMARS["json"]
    result = engine.generate(world.request(asked(world, grammar), SAMPLING.as_greedy))
    assert not {COUNTS, WORDS} & set(result.ref.names)
    for prompt, ids in list(
        zip(world.column(result, "prompt_ids"), world.column(result, "response_ids"), strict=True)
    )[:1]:
        left = left_by(world, pattern, ids)
        wanted = world.distribution(0, prompt, ids, Sampling(n=1, max_new_tokens=1), left)
        assert wanted.argmax(1).tolist() == ids


def begun_of(world: World, request: RolloutRequest, result: RolloutResult, tokens: int) -> BatchRef:
    """The samples as they stood after so many tokens."""
    ids = [row[:tokens] for row in world.column(result, "response_ids")]
    masks: list[SamplingMask | None] = [
        one.between(0, tokens) for one in read_masks(world.store, result.ref)
    ]
    columns: dict[str, object] = {
        "response_ids": [np.array(row, np.int32) for row in ids],
        "rollout_logprobs": [
            np.array(row[:tokens], np.float32) for row in world.column(result, "rollout_logprobs")
        ],
        "weight_spans": [np.array([0, 0, len(row)], np.int64) for row in ids],
        "finish_reason": [UNFINISHED] * len(ids),
        "status": np.full(len(ids), SampleStatus.UNFINISHED, np.int64),
        **mask_columns(masks, [len(row) for row in ids]),
    }
    kept = [name for name in result.ref.names if name not in columns]
    written = write_batch(world.store, f"{request.out_key}.begun", columns)
    return result.ref[kept].with_columns(written)


@pytest.mark.parametrize("name", ["json", "a thought or none"])
def test_what_was_begun_goes_on_in_its_grammar(
    engine: RolloutEngine, world: World, name: str
) -> None:
    """As after the loss of an engine: of tokens that another has drawn."""
    grammar, pattern = GRAMMARS[name]
    request = world.request(asked(world, grammar), SAMPLING)
    result = engine.generate(request)
    begun = begun_of(world, request, result, 7)
    again = engine.generate(
        dataclasses.replace(request, begun=begun, out_key=f"{request.out_key}.2")
    )
    first, second = (world.column(one, "response_ids") for one in (result, again))
    assert [ids[:7] for ids in first] == [ids[:7] for ids in second] and first != second
    check(world, again, SAMPLING, pattern)


def test_one_that_is_cut_goes_on_under_other_weights(
    engine: RolloutEngine, world: World, threads: ThreadPoolExecutor
) -> None:
    """Tokens that were saved on the way have their words, too."""
    grammar = TurnGrammar(answer=of_schema({"type": "string", "pattern": "^[ab]{100,}$"}))
    sampling = dataclasses.replace(SAMPLING, max_new_tokens=220)
    request = dataclasses.replace(
        world.request(asked(world, grammar, (5, 9)), sampling), save_every=0.02
    )
    partial = PartialSamples(world.store, request.out_key)
    shard = begun(engine, threads, request)
    engine.pause()

    def some() -> bool:
        saved = partial.read()
        return saved is not None and saved.fetch_numpy(world.store, "response_ids")[0].size > 32

    until(some, "a save")
    saved = partial.read()
    assert saved is not None
    for ids, mask in zip(
        saved.fetch_list(world.store, "response_ids"), read_masks(world.store, saved), strict=True
    ):
        mask.check_holds(np.asarray(ids))
    engine.cut([request.out_key])
    engine.resume()
    part = shard.result(30)
    assert SampleStatus.UNFINISHED in world.column(part, "status")
    engine.sync(world.weights[1])
    whole = engine.generate(
        dataclasses.replace(request, begun=part.ref, out_key=f"{request.out_key}.2")
    )
    masks = read_masks(world.store, whole.ref)
    columns = ("prompt_ids", "response_ids", "rollout_logprobs", "weight_spans")
    rows = zip(*(world.column(whole, name) for name in columns), masks, strict=True)
    drawn = 0
    for prompt, ids, logprobs, spans, mask in itertools.islice(rows, 4):
        left = left_by(world, '"[ab]{100,}"', ids)
        for place, number in enumerate(mask.numbers.tolist()):
            words = mask.sets[number - 1]
            assert words.have(np.arange(left.shape[1])).tolist() == left[place].tolist()
        for version, start, stop in zip(spans[0::3], spans[1::3], spans[2::3], strict=True):
            own = world.distribution(version, prompt, ids[:stop], sampling, left[:stop])
            own = own.gather(1, torch.tensor(ids[:stop])[:, None])[start:, 0]
            np.testing.assert_allclose(logprobs[start:stop], own, atol=2e-4)
            drawn += version == 1
    assert drawn, "some went on"
    engine.sync(world.weights[0])


def test_after_a_thought_that_a_budget_ended_the_answer_begins(
    engine: RolloutEngine, world: World
) -> None:
    closing, budget = "! Now.</think>\n\nSo: ", 6
    sampling = dataclasses.replace(
        SAMPLING, thinking_budget=budget, thinking_words=("<think>", "</think>", closing)
    )
    grammar = TurnGrammar(answer=JSON_ANSWER, thought="open")
    begin = world.tokenizer.encode("a<think>", add_special_tokens=False)
    prompts = write_batch(
        world.store,
        f"{next(world._keys)}.safetensors",
        {
            "prompt_ids": [np.array(begin, np.int32)],
            "group_id": np.array([7]),
            "prompt_row": np.array([0]),
            GRAMMAR: [grammar.to_json()],
        },
    )
    result = engine.generate(world.request(prompts, sampling))
    ids, authors = (world.column(result, name) for name in ("response_ids", "author"))
    for row, by, mask in zip(ids, authors, read_masks(world.store, result.ref), strict=True):
        start = budget + len(world.tokenizer.encode(closing, add_special_tokens=False))
        assert set(by[budget:start]) == {Author.BUDGET} and set(by[start:]) == {Author.POLICY}
        assert not mask.numbers[budget:start].any(), "nobody drew them"
        left = left_by(world, rf"[ \n]{{0,4}}{JSON}", row, start)[start:]
        sets = [None, *mask.sets]
        for place, number in enumerate(mask.numbers[start:].tolist()):
            words = sets[number]
            assert words is not None
            assert words.have(np.arange(left.shape[1])).tolist() == left[place].tolist()


@pytest.mark.slow
def test_texts_come_as_often_as_the_policy_has_it(engine: RolloutEngine, world: World) -> None:
    """Of a grammar of three texts: exact probabilities by all their ways, and 600 samples."""
    answers = ["x", "yes", "yet"]
    grammar = TurnGrammar(answer=of_schema({"enum": answers}))
    prompts = asked(world, grammar, (5,))
    sampling = dataclasses.replace(SAMPLING, n=600, max_new_tokens=9)
    result = engine.generate(world.request(prompts, sampling))
    prompt = world.column(result, "prompt_ids")[0]
    (end,) = end_token_ids(world.directory)
    pattern = "|".join(f'"{one}"' for one in answers)
    exact = {}
    for one in answers:
        ids = [*world.tokenizer.encode(f'"{one}"', add_special_tokens=False), end]
        left = left_by(world, pattern, ids)
        own = world.distribution(0, prompt, ids, sampling, left)
        exact[f'"{one}"'] = own.gather(1, torch.tensor(ids)[:, None]).sum().exp().item()
    assert sum(exact.values()) == pytest.approx(1.0, abs=1e-5)
    seen = Counter(texts(world, ids) for ids in world.column(result, "response_ids")[:600])
    assert seen.keys() <= exact.keys()
    for text, share in exact.items():
        assert abs(seen[text] / 600 - share) < 4 * (share * (1 - share) / 600) ** 0.5 + 1e-9


def test_nearly_all_words_are_stored_as_those_left_out(engine: RolloutEngine, world: World) -> None:
    """Within a string: a few bytes a token, where the words would be hundreds."""
    grammar = TurnGrammar(answer=of_schema({"type": "string", "minLength": 60}))
    result = engine.generate(world.request(asked(world, grammar), SAMPLING))
    counts, words = (world.column(result, name) for name in (COUNTS, WORDS))
    for own, left in list(zip(counts, words, strict=True))[:2]:
        assert len(own) >= 60
        assert len(left) < 2 * len(world.tokenizer), "of two or three sets, each once"
        assert any(one < 0 for one in left)


@pytest.mark.vllm
def test_a_turn_that_vllm_cannot_begin_is_an_error_and_no_sample(
    built: Callable[[str], RolloutEngine], world: World
) -> None:
    """Its core is given tokens that the grammar does not leave; without a mask nobody else looks."""
    engine = built("vllm")
    engine.sync(world.weights[0])
    request = world.request(asked(world, GRAMMARS["json"][0]), SAMPLING)
    result = engine.generate(request)
    begun = begun_of(world, request, result, 3)
    other = write_batch(
        world.store,
        f"{request.out_key}.other",
        {"response_ids": [np.full(3, 40, np.int32)] * len(begun)},
    )
    again = dataclasses.replace(
        request,
        begun=begun.with_columns(other),
        sampling=SAMPLING.of_nothing_trained,
        out_key=f"{request.out_key}.2",
    )
    with pytest.raises(RuntimeError, match="vLLM ended a request with an error"):
        engine.generate(again)
    assert len(engine.generate(request).ref) == 4, "it goes on with others"


def test_calls_have_the_templates_form(world: World) -> None:
    """A template that writes calls is followed; others get the form that is described in words."""
    assert call_form(world.tokenizer)[0].startswith("<tool_call>")
    for before, name, after in itertools.product(
        ["<tool_call>\n", ""], ["arguments", "parameters"], ["\n</tool_call>", ""]
    ):
        if bool(before) != bool(after):
            continue
        tokenizer = world.tokenizer.__class__.from_pretrained(world.directory)
        call = f'{{"name": "{{{{ c.function.name }}}}", "{name}": {{{{ c.function.arguments | tojson }}}}}}'
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}"
            f"{{% for c in m.tool_calls or [] %}}{before}{call}{after}{{% endfor %}}\n{{% endfor %}}"
        )
        begin, end = call_form(tokenizer)
        assert begin == f'{before}{{"name": "name71", "{name}": ' and end == f"}}{after}"


def test_a_schema_that_cannot_be_one_is_refused(world: World) -> None:
    grammars = Grammars(world.tokenizer, end_token_ids(world.directory))
    with pytest.raises(ValueError, match="the schema cannot become a grammar: Regex parsing error"):
        grammars.check(TurnGrammar(answer=of_schema({"type": "string", "pattern": "(?<=a)b"})))
