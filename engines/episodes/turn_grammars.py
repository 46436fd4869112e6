"""What an agent asks of a turn's text, as a grammar: JSON by a schema, or calls of tools.

Calls have the form that the chat template writes them in, so that the policy is not made to write
another than it knows; engines/episodes/tool_calls.py reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engines.episodes.tool_calls import ToolCall, tool_calls
from engines.models.grammars import BEGIN, END, Format, Grammars, TurnGrammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAG, _END_TAG = "<tool_call>", "</tool_call>"
_NAME, _KEY, _VALUE = "name71", "key82", "value93"
_TAIL = 64  # tokens at a prompt's end among which it opens a thought
_BLANKS = 32  # that may stand together in JSON: a model that writes them alone would never end


class TurnGrammars:
    """Makes them for a tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], refused: str
    ) -> None:
        """refused: why none is made, a sentence; empty: they are made."""
        self._tokenizer = tokenizer
        self._ends = ends
        self._refused = refused
        self._grammars: Grammars | None = None
        template = str(tokenizer.chat_template or "")
        self._thinks = END in template or END in tokenizer.get_vocab()
        self._form: tuple[str, str] | None = None

    def of(self, request: Mapping[str, Any], read: Sequence[int]) -> TurnGrammar | None:
        """That of an agent's request (JSON), which is after the tokens `read`; None: of any text.

        ValueError, in a sentence, where there is none of what is asked.
        """
        asked = request.get("grammar")
        if asked is None:
            return None
        if self._refused:
            raise ValueError(self._refused)
        schema, names = asked.get("schema"), asked.get("tools")
        tools = {one["function"]["name"]: one["function"] for one in request.get("tools") or ()}
        if unknown := [name for name in names or () if name not in tools]:
            raise ValueError(f"tool_choice names {unknown[0]}, which is no tool of the request")
        if names == [] and not tools:
            raise ValueError("tool_choice wants a call, and the request has no tools")
        answers: list[Format] = []
        if names is not None or (tools and asked.get("calls")):
            wanted = [tools[name] for name in names or tools]
            both = names is None  # a bare call could be an answer too
            answers.append(self._calls(wanted, asked.get("one", False), tagged=both))
        if names is None:
            answers.append(of_schema(schema))
        tail = str(self._tokenizer.decode(list(read[-_TAIL:])))
        opened = self._thinks and tail.rfind(BEGIN) > tail.rfind(END)
        return TurnGrammar(
            answer=answers[0] if len(answers) == 1 else {"type": "or", "elements": answers},
            thought="open" if opened else "may" if self._thinks else "no",
            calls="yes" if names is not None else "tagged" if len(answers) > 1 else "no",
        )

    def check(self, request: Mapping[str, Any], read: Sequence[int]) -> None:
        """ValueError, in a sentence, where no turn can be sampled for the request."""
        grammar = self.of(request, read)
        if grammar is not None:
            if self._grammars is None:
                self._grammars = Grammars(self._tokenizer, self._ends)
            self._grammars.check(grammar)

    def _calls(self, tools: Sequence[Mapping[str, Any]], one: bool, tagged: bool) -> Format:
        """Calls of some tools; one: not several. tagged: between tags, whatever the template has."""
        begin, end = _DEFAULT
        if self._form is None:
            self._form = call_form(self._tokenizer)
        if not tagged or self._form[0].startswith(_TAG):
            begin, end = self._form
        tags = [
            {
                "type": "tag",
                "begin": begin.replace(_NAME, json.dumps(tool["name"])[1:-1]),
                "content": of_schema(tool.get("parameters") or {"type": "object"}),
                "end": end,
            }
            for tool in tools
        ]
        alone = one or not begin.startswith(_TAG)
        return {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": "\n",
            "at_least_one": True,
            "stop_after_first": alone,
        }


_DEFAULT = (f'{_TAG}{{"name": "{_NAME}", "arguments": ', f"}}{_END_TAG}")


def call_form(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the chat template writes before and after the arguments of a call of _NAME."""
    from jinja2.exceptions import TemplateError

    made = {"name": _NAME, "arguments": {_KEY: _VALUE}}
    parameters = {"type": "object", "properties": {_KEY: {"type": "string"}}}
    tool = {
        "type": "function",
        "function": {"name": _NAME, "description": "", "parameters": parameters},
    }
    chat: list[Any] = [
        {"role": "user", "content": "question"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": made}],
        },
    ]
    if not tokenizer.chat_template:
        return _DEFAULT
    try:
        text = str(tokenizer.apply_chat_template(chat, tools=[tool], tokenize=False))
    except (TemplateError, TypeError, ValueError):
        return _DEFAULT
    place = text.rfind(_VALUE)
    start, stop = text.rfind("{", 0, place), text.find("}", place) + 1
    first = text.rfind("{", 0, text.rfind(_NAME, 0, max(start, 0)))
    last = text.find("}", stop) + 1
    if min(place, start, first) < 0 or not stop or not last:
        return _DEFAULT
    before, after = text[:first], text[last:]
    if before.rstrip().endswith(_TAG) and after.lstrip().startswith(_END_TAG):
        first = before.rfind(_TAG)
        last += after.find(_END_TAG) + len(_END_TAG)
    form = text[first:start], text[stop:last]
    read = tool_calls(f"{form[0]}{{}}{form[1]}")
    return form if read == [ToolCall(_NAME, {})] else _DEFAULT


def of_schema(schema: Any) -> Format:
    """JSON by a schema. ValueError, in a sentence, where it asks for what a grammar does not hold."""
    for one in list(_schemas(schema)):
        _check_keywords(one)
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _BLANKS}


_ABOUT = {"title", "description", "default", "examples", "$defs", "definitions", "$schema", "$id"}
_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties"),
    },
}
# Keywords by which a schema says no to a value; others are notes.
_KEYWORDS = set().union(*_OF_TYPE.values()) | {
    *("type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
    *("uniqueItems", "contains", "minContains", "maxContains", "dependentRequired"),
    *("dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"),
    *("additionalItems", "$dynamicRef", "contentEncoding", "contentMediaType"),
}


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all within it."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema is an object, and {str(schema)[:40]} is none")
    yield schema
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        inner = schema.get(name) or {}
        if not isinstance(inner, dict):
            raise ValueError(f"{name} of a JSON schema is an object of schemas")
        for one in inner.values():
            yield from _schemas(one)
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        parts = schema.get(name) or []
        if not isinstance(parts, list):
            raise ValueError(f"{name} of a JSON schema is a list of schemas")
        for one in parts:
            yield from _schemas(one)
    for name in ("items", "additionalProperties", "propertyNames"):
        if name in schema:
            yield from _schemas(schema[name])


def _check_keywords(schema: Mapping[str, Any]) -> None:
    used = _KEYWORDS.intersection(schema)
    types = schema.get("type")
    kinds = [types] if isinstance(types, str) else types or []
    first = next((name for name in ("$ref", "anyOf", "oneOf", "allOf") if name in schema), None)
    if first is not None:
        allowed = {first}
    elif "enum" in schema or "const" in schema:
        allowed = {"type", "enum", "const"}
    else:
        allowed = {"type"}.union(*(_OF_TYPE.get(str(kind), set()) for kind in kinds))
        allowed |= set() if kinds else _OF_TYPE["object"] if "properties" in schema else set()
    if first == "allOf" and len(schema["allOf"]) > 1:
        allowed = set()
    if {"pattern", "format"} & used:
        allowed -= {"minLength", "maxLength"}
    if unknown := sorted(used - allowed):
        raise ValueError(
            f"the JSON schema has {unknown[0]} in a place where no grammar heeds it. Leave it out, "
            "and check the answer yourself"
        )
    missing = set(schema.get("required") or ()) - set(schema.get("properties") or ())
    if missing:
        raise ValueError(
            f"the JSON schema requires {min(missing)}, which its properties lack. Add it to them"
        )
