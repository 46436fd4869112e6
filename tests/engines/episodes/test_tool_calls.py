"""Calls of tools in what a model wrote."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.episodes.tool_calls import Malformed, ToolCall, tool_calls

ADD = ToolCall("add", {"a": 1, "b": [2, "}"]})
NOW = ToolCall("now", {})
texts = st.text(st.characters(exclude_characters="<"))  # no tags
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
calls = st.lists(
    st.builds(ToolCall, texts.filter(bool), st.dictionaries(texts, values, max_size=3)),
    min_size=1,
    max_size=3,
)


def as_json(call: ToolCall, key: str = "arguments") -> str:
    return json.dumps({"name": call.name, key: call.arguments})


def tagged(calls: list[ToolCall]) -> str:
    return "".join(f"<tool_call>\n{as_json(call)}\n</tool_call>\n" for call in calls)


def marked(calls: list[ToolCall]) -> str:
    return f"[TOOL_CALLS] [{', '.join(map(as_json, calls))}]"


def bare(calls: list[ToolCall]) -> str:
    return f"[{', '.join(as_json(call, 'parameters') for call in calls)}]"


def fenced(calls: list[ToolCall]) -> str:
    return "".join(f"\n```json\n{as_json(call)}\n```\n" for call in calls)


@pytest.mark.parametrize("form", [tagged, marked, bare, fenced])
@given(written=calls)
@settings(max_examples=40)
def test_calls_come_back(form, written) -> None:  # type: ignore[no-untyped-def]
    text = form(written)
    assert tool_calls(text) == written
    if form is not bare:
        assert tool_calls(f"<think>I call {tagged([NOW])}</think>Now: {text}") == written


@pytest.mark.parametrize(
    "text",
    [
        as_json(ADD),
        f"  \n{as_json(ADD, 'parameters')}\n",
        f'<|python_tag|>{{"type": "function", "name": "add", "parameters": {json.dumps(ADD.arguments)}}}',
        f"I shall add.\n<tool_call>{as_json(ADD)}</tool_call>",
        f"<tool_call>{as_json(ADD)}",  # an end token, or a limit, came before the tag's end
        f"<tool_call>[{as_json(ADD)}]</tool_call>",
        f"Well:\n```json\n{as_json(ADD)}\n  ```",
        f"Well:\n```\n{as_json(ADD)}\n```\nThat is all.",
        f"thoughts that the prompt began: {as_json(NOW)}</think>\n{as_json(ADD)}",
        json.dumps({"name": "add", "arguments": json.dumps(ADD.arguments)}),
    ],
)
def test_forms_of_one_call(text: str) -> None:
    assert tool_calls(text) == [ADD]


def test_fences_within_arguments() -> None:
    call = ToolCall("write", {"text": "```python\nprint(1)\n```\n"})
    assert tool_calls(fenced([call, ADD])) == [call, ADD]


@pytest.mark.parametrize(
    "text",
    ['{"name": "now"}', '{"name": "now", "arguments": null}', '{"name": "now", "arguments": ""}'],
)
def test_a_tagged_call_may_lack_arguments(text: str) -> None:
    assert tool_calls(f"<tool_call>{text}</tool_call>") == [NOW]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The answer is 7.",
        "[]",
        "[1, 2]",
        '{"name": "Ada", "age": 36}',
        'Her record:\n```json\n{"name": "Ada"}\n```',
        "```python\nprint({})\n```",
        "{not JSON}",
        f"You could write {as_json(ADD)} for that.",
        f"<think>{tagged([ADD])}</think>7",
        f"<think>{tagged([ADD])}",
        "[" * 100_000,
    ],
)
def test_what_is_no_call(text: str) -> None:
    assert tool_calls(text) is None


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ('<tool_call>{"name": "add", </tool_call>', "The call is not valid JSON: "),
        ("<tool_call></tool_call>", "The call is not valid JSON: "),
        ("<tool_call>" + "[" * 100_000, "The JSON is nested too deeply."),
        ("<tool_call>[]</tool_call>", "The list of calls is empty."),
        ("<tool_call>7</tool_call>", "A call is a JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', '"name" is missing or is no text.'),
        ('{"name": 7, "arguments": {}}', '"name" is missing or is no text.'),
        ('{"name": "add", "arguments": [1, 2]}', "The arguments of add are not a JSON object."),
        ('{"name": "add", "arguments": "{1"}', "The call is not valid JSON: "),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is no number of JSON"),
        (as_json(ADD) + " and so on", "The call is not valid JSON: Extra data"),
        ('{"name": "add", "parameters": {', "The call is not valid JSON: "),
        ('```json\n{"name": "add", "arguments": {"a": 1}\n```', "The call is not valid JSON: "),
        ("[TOOL_CALLS] add", "The call is not valid JSON: "),
        (tagged([ADD]) + "<tool_call>{}</tool_call>", '"name" is missing or is no text.'),
    ],
)
def test_malformed_calls_name_the_mistake(text: str, mistake: str) -> None:
    found = tool_calls(text)
    assert isinstance(found, Malformed)
    assert mistake in found.mistake
    assert found.text in text


PIECES = [
    *"{}[]:, \n7",
    "<tool_call>",
    "</tool_call>",
    '"name"',
    '"arguments"',
    "</think>",
    "```json\n",
]


@given(st.text() | st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
def test_nothing_that_a_model_writes_is_an_error(text: str) -> None:
    found = tool_calls(text)
    assert found is None or isinstance(found, Malformed) or found
