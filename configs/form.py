"""Settings as JSON schema for a deployment's form: their order, choices as tabs, people's names.

Prefect 3.7's form sorts by `position`, on each level; without, the order is the database's, which on
Postgres is that of the names' lengths. It shows `anyOf` as tabs and knows no `oneOf` (not reported
there). It chooses a value's tab by the names of its properties alone, so fewer properties come first,
and choices with the same properties share a tab, where `kind` is a drop-down. In a list it shows no
tabs, and of many the last run out of the page: there a choice is one group with the settings of all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Schema = dict[str, Any]
Resolve = Callable[[Schema], Schema]  # a reference to what it refers to

FORM = ContextVar("form", default=True)  # whether schemas are made for the form

WORDS = {
    "adam": "Adam",
    "gib": "(GiB)",
    "gpu": "GPU",
    "gpus": "GPUs",
    "id": "ID",
    "kl": "KL",
    "kv": "KV",
    "logprobs": "log-probs",
    "lora": "LoRA",
    "mib": "(MiB)",
    "ssh": "SSH",
    "tls": "TLS",
    "mlflow": "MLflow",
    "uri": "URI",
}
MOST_TABS = 8
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern")
BRANCHES = ("if", "then", "else")
CHECKED = ("properties", "required", "additionalProperties")
PLAIN = ("string", "integer", "number")


@contextmanager
def no_form() -> Iterator[None]:
    """During the body schemas are pydantic's own, as in a process that registers no deployment."""
    before = FORM.set(False)
    try:
        yield
    finally:
        FORM.reset(before)


def title_of(name: str) -> str:
    """A setting's name as a heading: kv_cache_gib becomes KV cache (GiB)."""
    words = [WORDS.get(word, word) for word in name.split("_")]
    return words[0][:1].upper() + " ".join(words)[1:]


def with_tabs(schema: Schema, resolve: Resolve, first: Sequence[str] = ()) -> Schema:
    """A model's schema with its discriminated unions as the form shows them, and all in order.

    first: the settings that stand before the others.
    """
    fields = schema.get("properties", {})
    names = [*first, *(name for name in fields if name not in first)]
    properties = {name: _property(fields[name], resolve) for name in names}
    return {**schema, "properties": placed(properties)} if properties else schema


def placed(properties: Mapping[str, Schema]) -> dict[str, Schema]:
    """Properties that the form shows in this order."""
    return {
        name: {**inner, "position": place} for place, (name, inner) in enumerate(properties.items())
    }


def _property(schema: Schema, resolve: Resolve) -> Schema:
    if "items" in schema and isinstance(schema["items"], Mapping):
        items = dict(schema["items"])
        shown = _one_group(items, resolve) if _is_choice(items) else _property(items, resolve)
        return {**schema, "items": shown}
    if [_is_choice(part) for part in schema.get("anyOf", [])] == [True, False]:
        choice, nothing = schema["anyOf"]
        inner = _property({**schema, **choice, "anyOf": ()}, resolve)
        if "anyOf" not in inner:
            return schema
        otherwise = {k: inner.pop(k) for k in BRANCHES}
        return {**inner, "anyOf": [*inner["anyOf"], nothing], "if": nothing, "else": otherwise}
    if not _is_choice(schema):
        return schema
    choices = [resolve(choice) for choice in schema["oneOf"]]
    groups = tabs(choices)
    if len(groups) > MOST_TABS:
        return _one_group(schema, resolve)
    return {**_without_choice(schema), "anyOf": groups, **rules(choices)}


def _is_choice(schema: Schema) -> bool:
    return "oneOf" in schema and "discriminator" in schema


def _without_choice(schema: Schema) -> Schema:
    return {k: v for k, v in schema.items() if k not in ("oneOf", "anyOf", "discriminator")}


def _one_group(schema: Schema, resolve: Resolve) -> Schema:
    choices = [resolve(choice) for choice in schema["oneOf"]]
    return {**_without_choice(schema), **one_group(choices)}


def one_group(choices: Sequence[Schema]) -> Schema:
    """All settings of several choices below `kind`, each with the kinds that have it.

    None has a default, which the form would fill in for kinds that do not have it: what is left
    empty is not sent, and `rules` say what the kind that was chosen takes.
    """
    shown: dict[str, Schema] = {"kind": _kind_of(choices)}
    having: dict[str, list[Schema]] = {}
    for choice in choices:
        for name in choice["properties"]:
            having.setdefault(name, []).append(choice)
    del having["kind"]
    for name, members in having.items():
        shown[name] = _optional(name, members, of_all=len(members) == len(choices))
    return {"type": "object", "properties": placed(shown), **rules(choices)}


def _optional(name: str, members: Sequence[Schema], of_all: bool) -> Schema:
    """A setting of these choices, as a field that may be left empty."""
    meanings: dict[str, list[str]] = {}
    for choice in members:
        schema = choice["properties"][name]
        meaning = str(schema.get("description") or "")
        if schema.get("default") is not None:
            meaning = f"{meaning} Empty: {_written(schema['default'])}.".strip()
        meanings.setdefault(meaning, []).append(_kind(choice))
    alike = of_all and len(meanings) == 1
    texts = [
        f"{'' if alike else ', '.join(kinds) + ': '}{text}" for text, kinds in meanings.items()
    ]
    field = _field([choice["properties"][name] for choice in members])
    return {"title": title_of(name), "description": " ".join(texts).strip(), **field}


def _written(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return default if isinstance(default, str) else json.dumps(default)


def _field(members: Sequence[Schema]) -> Schema:
    """What the form shows for one of these: a field, a drop-down, or else JSON (no type at all)."""
    if any("anyOf" in member for member in members):  # perhaps no value
        values = [
            [value for value in member.get("anyOf", [member]) if value.get("type") != "null"]
            for member in members
        ]
        inner = _field([value for member in values for value in member])
        return {"anyOf": [inner, {"type": "null"}]} if inner.get("type") in PLAIN else {}
    if any("$ref" in member or "if" in member for member in members):
        return {}
    types = {member.get("type") for member in members}
    if types == {"boolean"}:  # of a boolean that is left out, the form would make one that is off
        return {"enum": [True, False]}
    if types == {"string"} and all("enum" in member or "const" in member for member in members):
        named = [member.get("enum", [member.get("const")]) for member in members]
        return {
            "type": "string",
            "enum": list(dict.fromkeys(value for member in named for value in member)),
        }
    if types <= {"integer", "number"}:
        return {"type": "number" if "number" in types else "integer"}
    if types == {"string"}:
        return {"type": "string"}
    items = members[0].get("items", {})
    if types == {"array"} and all(member.get("items") == items for member in members):
        return {"type": "array", "items": items} if items.get("type") in PLAIN else {}
    return {}


def tabs(choices: list[Schema]) -> list[Schema]:
    """What is shown: choices with the same properties as one tab, fewest properties first.

    Bounds stand in `rules`: a value that breaks one of them must still fit its tab, for else it is
    refused with the complaint of another tab.
    """
    groups: dict[frozenset[str], list[Schema]] = {}
    for choice in choices:
        groups.setdefault(frozenset(choice["properties"]), []).append(choice)
    ordered = sorted(groups.items(), key=lambda group: len(group[0]))
    return [_tab(members) for _, members in ordered]


def rules(choices: Sequence[Schema]) -> Schema:
    """What the server checks: the rules of the choice that `kind` names, and it names the field."""
    kinds = [_kind(choice) for choice in choices]
    schema: Schema = {"required": ["kind"], "properties": {"kind": {"enum": kinds}}}
    for kind, choice in zip(kinds, choices, strict=True):
        when = {"properties": {"kind": {"const": kind}}, "required": ["kind"]}
        then = {k: choice[k] for k in (*CHECKED, "description") if k in choice}
        schema = {"if": when, "then": then, "else": schema}
    return schema


def without(choice: Schema, kinds: Collection[str]) -> Schema:
    """A choice that is shown as one group, without some kinds."""
    options = [option for option in _choices_of(choice) if _kind(option) not in kinds]
    rest = dict(choice)
    if rest.get("default", {}).get("kind") in kinds:
        del rest["default"]
    return {**rest, **one_group(options)}


def _choices_of(schema: Schema) -> list[Schema]:
    """What `rules` were made of, in its order."""
    choices = []
    while "if" in schema:
        choices.append(schema["then"])
        schema = schema["else"]
    return choices[::-1]


def _tab(members: list[Schema]) -> Schema:
    kinds, kind = [_kind(member) for member in members], _kind_of(members)
    if len(kinds) == 1:
        kind["default"] = kinds[0]
    common = _common([member["properties"] for member in members])
    properties = {"kind": kind} | {
        name: schema for name, schema in common.items() if name != "kind"
    }
    return {
        "type": "object",
        "title": " / ".join(kinds),
        "properties": placed(properties),
        "required": members[0].get("required", []),
    }


def _kind_of(choices: Sequence[Schema]) -> Schema:
    """The drop-down that says which it is."""
    kinds = [_kind(choice) for choice in choices]
    meanings = [f"{_kind(choice)}: {choice.get('description', '')}" for choice in choices]
    return {"title": "Kind", "type": "string", "enum": kinds, "description": " ".join(meanings)}


def _kind(choice: Schema) -> str:
    kind: str = choice["properties"]["kind"]["const"]
    return kind


def _common(members: list[dict[str, Schema]]) -> dict[str, Schema]:
    """Each property with what all members say of it, and with each one's description, for display."""
    first, *others = members
    properties: dict[str, Schema] = {}
    for name, schema in first.items():
        properties[name] = {
            key: value
            for key, value in schema.items()
            if key not in BOUNDS and all(other[name].get(key) == value for other in others)
        }
        meanings = dict.fromkeys(str(member[name].get("description", "")) for member in members)
        properties[name]["description"] = " ".join(meanings)
    return properties
