"""What agents ask of a turn's text, as grammars: which, for which requests, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase
from xgrammar import GrammarMatcher

from configs.model import RandomModel
from engines.episodes.tool_calls import ToolCall, tool_calls
from engines.episodes.turn_grammars import TurnGrammars
from engines.models.checkpoints import load_tokenizer, materialize
from engines.models.grammars import Grammars, TurnGrammar

PARAMETERS = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("add", 'say "x"')
]
SCHEMA = {"enum": ["yes", {"name": "add", "arguments": {"n": 1}}]}
ADD = '<tool_call>{"name": "add", "arguments": {"n": 1}}</tool_call>'
SAY = '<tool_call>{"name": "say \\"x\\"", "arguments": {"n": -2}}</tool_call>'
EITHER = {"schema": SCHEMA, "calls": True, "one": False}


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(materialize(RandomModel(), tmp_path))


Fits = Callable[[TurnGrammar, str], bool]


@pytest.fixture
def fits(tokenizer: PreTrainedTokenizerBase) -> Fits:
    """Whether a text can be a whole turn."""
    grammars = Grammars(tokenizer, [tokenizer.eos_token_id])

    def whole(grammar: TurnGrammar, text: str) -> bool:
        matcher = GrammarMatcher(grammars.compiled(grammar.structural_tag()))
        return bool(matcher.accept_string(text) and matcher.is_completed())

    return whole


def asked(grammar: dict[str, Any] | None, tools: Any = TOOLS) -> dict[str, Any]:
    return {"tools": tools, **({} if grammar is None else {"grammar": grammar})}


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        ({"tools": [], "one": False}, [ADD, SAY, f"{SAY}\n{ADD}"], ['"yes"', f"{ADD} ", "x" + ADD]),
        ({"tools": [], "one": True}, [ADD, SAY], [f"{SAY}\n{ADD}"]),
        ({"tools": ["add"], "one": True}, [ADD], [SAY]),
        (EITHER, [ADD, '"yes"', f"{SAY}\n{ADD}"], ['"no"', "yes"]),
        ({"schema": SCHEMA, "calls": False}, ['"yes"'], [ADD]),
        ({"schema": {"type": "object"}, "calls": False}, ["{}", '{"a": [1, {"b": null}]}'], ["[]"]),
    ],
)
def test_texts_that_fit(
    tokenizer: PreTrainedTokenizerBase,
    fits: Fits,
    grammar: dict[str, Any],
    yes: list[str],
    no: list[str],
) -> None:
    made = TurnGrammars(tokenizer, [tokenizer.eos_token_id], "").of(asked(grammar), [5])
    assert made is not None
    assert TurnGrammar.of_json(made.to_json()) == made
    for text in yes:
        assert fits(made, text), text
        if text.startswith("<"):
            found = tool_calls(text, answer_alone=True)
            assert isinstance(found, list) and isinstance(found[0], ToolCall)
    for text in no:
        assert not fits(made, text), text


def test_a_thought_comes_before(tokenizer: PreTrainedTokenizerBase, fits: Fits) -> None:
    """By the template, and by what stands at the prompt's end."""
    plain = tokenizer.chat_template
    tokenizer.chat_template = f"{plain}{{# </think> #}}"
    grammars = TurnGrammars(tokenizer, [tokenizer.eos_token_id], "")
    request = asked({"schema": {"enum": ["yes", "</think>"]}, "calls": False})

    def after(prompt: str) -> TurnGrammar:
        made = grammars.of(request, tokenizer.encode(prompt, add_special_tokens=False))
        assert made is not None
        return made

    may, opened = after("a <think> b</think> c"), after("assistant:<think>\n")
    assert (may.thought, opened.thought) == ("may", "open")
    for text in ('"yes"', '<think>hm "</think>\n\n"yes"', '<think></think>"</think>"'):
        assert fits(may, text)
        assert text[may.begins(text) :].strip() in ('"yes"', '"</think>"')
    assert not fits(may, 'hm</think>"yes"') and not fits(opened, '"yes"')
    assert fits(opened, 'hm</think>\n"</think>"')
    assert opened.begins('hm</think>\n"</think>"') == len("hm</think>")
    assert opened.begins("hm") == 2 and may.begins('"</think>"') == 0
    tokenizer.chat_template = plain
    made = TurnGrammars(tokenizer, [2], "").of(request, [5])
    assert made is not None and made.thought == "no"


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (asked({"tools": ["sub"], "one": True}), "tool_choice names sub, which is no tool"),
        (asked({"tools": [], "one": True}, []), "wants a call, and the request has no tools"),
        *(
            (asked({"schema": schema, "calls": False}), said)
            for schema, said in (
                ({"not": {"type": "string"}}, "has not in a place where no grammar"),
                ({"type": "array", "items": {}, "uniqueItems": True}, "has uniqueItems"),
                ({"allOf": [{}, {}]}, "has allOf"),
                ({"type": "string", "pattern": "a+", "maxLength": 3}, "has maxLength"),
                ({"properties": {"a": {"if": {}}}}, "has if"),
                ({"$defs": {"a": {"contains": {}}}, "$ref": "#/$defs/a"}, "has contains"),
                ({"type": "object", "required": ["a"]}, "requires a, which its properties lack"),
                ({"items": 3}, "a JSON schema is an object, and 3 is none"),
                ({"type": "number", "multipleOf": 0.1}, "has multipleOf"),
                ({"type": "nonsense"}, 'cannot become a grammar: Unsupported type "nonsense"'),
                ({"$ref": "#/$defs/x"}, "cannot become a grammar: Cannot find field"),
            )
        ),
    ],
)
def test_what_cannot_be_held_is_refused(
    tokenizer: PreTrainedTokenizerBase, request_: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        TurnGrammars(tokenizer, [tokenizer.eos_token_id], "").check(request_, [5])


def test_where_there_is_none_the_setting_is_named(tokenizer: PreTrainedTokenizerBase) -> None:
    grammars = TurnGrammars(tokenizer, [2], "Set it.")
    with pytest.raises(ValueError, match="Set it"):
        grammars.check(asked({"tools": []}), [5])
    assert grammars.of(asked(None), [5]) is None


def test_without_the_library_a_sentence_says_so(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.models.grammars.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"package xgrammar.*: pip install .*xgrammar"):
        TurnGrammars(tokenizer, [2], "").check(asked({"tools": []}), [5])


def test_models_of_pydantic_become_grammars(tokenizer: PreTrainedTokenizerBase, fits: Fits) -> None:
    """With references, optional fields and choices, as clients send them."""
    from typing import Literal

    from pydantic import BaseModel, Field

    class Part(BaseModel):
        kind: Literal["a", "b"]
        size: int | None = Field(None, description="in bytes", ge=0)

    class Answer(BaseModel):
        parts: list[Part] = Field(min_length=1, max_length=2)
        named: dict[str, float] = Field(default_factory=dict)

    schema = Answer.model_json_schema()
    made = TurnGrammars(tokenizer, [2], "").of(asked({"schema": schema, "calls": False}), [5])
    assert made is not None
    text = '{"parts": [{"kind": "a", "size": 3}, {"kind": "b"}], "named": {"x": 1.5}}'
    assert fits(made, text) and Answer.model_validate(json.loads(text)).parts[0].size == 3
    for other in ('{"parts": []}', '{"parts": [{"kind": "c"}]}', '{"named": {}}'):
        assert not fits(made, other)
