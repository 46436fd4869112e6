"""Settings as JSON schema for a form: choices as tabs, names as people write them.

Prefect 3.7's form shows `anyOf` as tabs and knows no `oneOf` (not reported there). It chooses a
value's tab by the names of its properties alone, so fewer properties come first, and choices with
the same properties share a tab, where `kind` is a drop-down.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

Schema = dict[str, Any]
Resolve = Callable[[Schema], Schema]  # a reference to what it refers to

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


def title_of(name: str) -> str:
    """A setting's name as a heading: kv_cache_gib becomes KV cache (GiB)."""
    words = [WORDS.get(word, word) for word in name.split("_")]
    return words[0][:1].upper() + " ".join(words)[1:]


def with_tabs(schema: Schema, resolve: Resolve) -> Schema:
    """A model's schema with its discriminated unions as anyOf."""
    properties = {
        name: _property(inner, resolve) for name, inner in schema.get("properties", {}).items()
    }
    return {**schema, "properties": properties} if properties else schema


def _property(schema: Schema, resolve: Resolve) -> Schema:
    if "items" in schema and isinstance(schema["items"], Mapping):
        return {**schema, "items": _property(dict(schema["items"]), resolve)}
    if [_is_choice(one) for one in schema.get("anyOf", [])] == [True, False]:
        choice, nothing = schema["anyOf"]
        inner = _property({**schema, **choice, "anyOf": ()}, resolve)
        if "anyOf" not in inner:
            return schema
        otherwise = {k: inner.pop(k) for k in BRANCHES}
        return {**inner, "anyOf": [*inner["anyOf"], nothing], "if": nothing, "else": otherwise}
    if not _is_choice(schema):
        return schema
    choices = [resolve(choice) for choice in schema["oneOf"]]
    rest = {k: v for k, v in schema.items() if k not in ("oneOf", "anyOf", "discriminator")}
    shown = tabs(choices)
    if len(shown) > MOST_TABS:  # more run out of the page: JSON is edited instead
        kinds = ", ".join(_kind(choice) for choice in choices)
        return {**rest, "description": f"{rest.get('description', '')} kind: one of {kinds}."} | (
            rules(choices)
        )
    return {**rest, "anyOf": shown, **rules(choices)}


def _is_choice(schema: Schema) -> bool:
    return "oneOf" in schema and "discriminator" in schema


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


def rules(choices: list[Schema]) -> Schema:
    """What the server checks: the rules of the choice that `kind` names, and it names the field."""
    kinds = [_kind(choice) for choice in choices]
    found: Schema = {"required": ["kind"], "properties": {"kind": {"enum": kinds}}}
    for kind, choice in zip(kinds, choices, strict=True):
        when = {"properties": {"kind": {"const": kind}}, "required": ["kind"]}
        then = {k: choice[k] for k in CHECKED if k in choice}
        found = {"if": when, "then": then, "else": found}
    return found


def without(choice: Schema, kinds: Collection[str]) -> Schema:
    """A choice with more kinds than tabs, as `with_tabs` leaves it, without some of them."""
    every, left = _kinds_of(choice), _rules_without(choice, kinds)
    kept = _kinds_of(left)
    said = str(choice.get("description", "")).replace(", ".join(every), ", ".join(kept))
    rest = {k: v for k, v in choice.items() if k not in BRANCHES}
    if rest.get("default", {}).get("kind") in kinds:
        del rest["default"]
    return {**rest, **{k: left[k] for k in BRANCHES if k in left}, "description": said}


def _kinds_of(choice: Schema) -> list[str]:
    """Its kinds, in their order."""
    while "if" in choice:
        choice = choice["else"]
    return list(choice["properties"]["kind"]["enum"])


def _rules_without(found: Schema, kinds: Collection[str]) -> Schema:
    """What `rules` makes, without the branches of some kinds."""
    if "if" not in found:
        kept = [kind for kind in _kinds_of(found) if kind not in kinds]
        return {**found, "properties": {"kind": {"enum": kept}}}
    rest = _rules_without(found["else"], kinds)
    return rest if found["if"]["properties"]["kind"]["const"] in kinds else {**found, "else": rest}


def _tab(members: list[Schema]) -> Schema:
    kinds = [_kind(member) for member in members]
    meanings = [f"{_kind(member)}: {member.get('description', '')}" for member in members]
    kind = {"title": "Kind", "type": "string", "enum": kinds, "description": " ".join(meanings)}
    if len(kinds) == 1:
        kind["default"] = kinds[0]
    return {
        "type": "object",
        "title": " / ".join(kinds),
        "properties": {**_common([member["properties"] for member in members]), "kind": kind},
        "required": members[0].get("required", []),
    }


def _kind(choice: Schema) -> str:
    kind: str = choice["properties"]["kind"]["const"]
    return kind


def _common(members: list[dict[str, Schema]]) -> dict[str, Schema]:
    """Each property with what all members say of it, and with each one's description, for display."""
    first, *others = members
    found: dict[str, Schema] = {}
    for name, said in first.items():
        found[name] = {
            key: value
            for key, value in said.items()
            if key not in BOUNDS and all(other[name].get(key) == value for other in others)
        }
        meanings = dict.fromkeys(str(one[name].get("description", "")) for one in members)
        found[name]["description"] = " ".join(meanings)
    return found
