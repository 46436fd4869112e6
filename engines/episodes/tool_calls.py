"""What a model wrote as calls of tools, in the forms that models are known to write.

Of these forms, each with one call or several:

- `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen),
- `[TOOL_CALLS] [{"name": …, "arguments": {…}}]` (Mistral),
- a fenced block of JSON, or JSON and nothing else (Llama: `"parameters"` for `"arguments"`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from storage.objects.documents import JsonValue

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_LISTED = re.compile(r"\[TOOL_CALLS\](.*)", re.DOTALL)
_FENCED = re.compile(r"^[ \t]*```(?:json)?[ \t]*\n(.*?)\n[ \t]*```", re.DOTALL | re.MULTILINE)
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wrote."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Malformed:
    """What the model meant as a call and is none."""

    text: str  # as it was written
    mistake: str  # a sentence, to be shown to the model


class _NoCall(ValueError):
    """Says in a sentence why something is no call."""


def tool_calls(text: str) -> list[ToolCall] | Malformed | None:
    """The calls in a turn of the model, in its order; None where it calls nothing.

    Malformed where one of several is: then none is to be made. A thought before the first `</think>`
    calls nothing. JSON without a name and arguments is an answer, and a call only where it is tagged.
    """
    _, closed, answer = text.partition("</think>")
    if not closed:
        answer = "" if text.lstrip().startswith("<think>") else text
    if tagged := _TAGGED.findall(answer):
        return _calls(tagged)
    if listed := _LISTED.search(answer):
        return _calls([listed[1]])
    fenced = [block for block in _FENCED.findall(answer) if _is_like_a_call(block)]
    if fenced:
        return _calls(fenced)
    bare = answer.strip().removeprefix("<|python_tag|>").strip()
    if bare.startswith(("{", "[")) and _is_like_a_call(bare):
        return _calls([bare])
    return None


def _is_like_a_call(text: str) -> bool:
    """Whether a text is meant as calls: by its keys, or by its look where it is not valid JSON."""
    try:
        value = _read(text)
    except _NoCall:
        return '"name"' in text and any(f'"{key}"' in text for key in _ARGUMENTS)
    items = value if isinstance(value, list) else [value]
    return any(
        isinstance(item, dict) and "name" in item and any(key in item for key in _ARGUMENTS)
        for item in items
    )


def _calls(blocks: list[str]) -> list[ToolCall] | Malformed:
    calls: list[ToolCall] = []
    for block in blocks:
        try:
            value = _read(block)
            items = value if isinstance(value, list) else [value]
            if not items:
                raise _NoCall("The list of calls is empty.")
            calls += [_call(item) for item in items]
        except _NoCall as error:
            return Malformed(block.strip(), str(error))
    return calls


def _read(text: str) -> JsonValue:
    """The JSON value that a text is; _NoCall for another text."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise _NoCall("The JSON is nested too deeply.") from None
    except ValueError as error:
        raise _NoCall(f"The call is not valid JSON: {error}.") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _call(item: JsonValue) -> ToolCall:
    if not isinstance(item, dict):
        raise _NoCall("A call is a JSON object with a name and arguments.")
    name = item.get("name")
    if not isinstance(name, str) or not name:
        raise _NoCall('A call has the name of a tool: "name" is missing or is no text.')
    arguments = next((item[key] for key in _ARGUMENTS if item.get(key) is not None), {})
    if isinstance(arguments, str):  # JSON within JSON, as in messages of the OpenAI form
        arguments = _read(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise _NoCall(f"The arguments of {name} are not a JSON object.")
    return ToolCall(name, arguments)
