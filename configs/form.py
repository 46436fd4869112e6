"""Settings as JSON schema for a form: choices as tabs, names as people write them.

Prefect's form shows `anyOf` as tabs and knows no `oneOf`. It chooses a value's tab by the names of
its properties alone, so fewer properties come first, and choices with the same properties share a
tab, where `kind` is a drop-down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    "mib": "(MiB)",
    "mlflow": "MLflow",
    "uri": "URI",
}


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
    if "oneOf" not in schema or "discriminator" not in schema:
        return schema
    rest = {k: v for k, v in schema.items() if k not in ("oneOf", "discriminator")}
    return {**rest, "anyOf": tabs(schema["oneOf"], resolve)}


def tabs(choices: list[Schema], resolve: Resolve) -> list[Schema]:
    """The choices, those with the same properties as one, fewest properties first."""
    groups: dict[frozenset[str], list[Schema]] = {}
    for choice in choices:
        found = resolve(choice)
        groups.setdefault(frozenset(found.get("properties", {})), []).append(found)
    ordered = sorted(groups.items(), key=lambda group: len(group[0]))
    return [_tab(members) for _, members in ordered]


def _tab(members: list[Schema]) -> Schema:
    kinds = [member["properties"]["kind"]["const"] for member in members]
    meanings = [
        f"{kind}: {member.get('description', '')}"
        for kind, member in zip(kinds, members, strict=True)
    ]
    first = members[0]
    kind = {
        "title": "Kind",
        "type": "string",
        "enum": kinds,
        "description": " ".join(meanings),
    }
    if len(kinds) == 1:
        kind["default"] = kinds[0]
    return {
        "type": "object",
        "title": " / ".join(kinds),
        "properties": {**_common([member["properties"] for member in members]), "kind": kind},
        "required": ["kind", *(name for name in first.get("required", []) if name != "kind")],
        "additionalProperties": False,
    }


def _common(members: list[dict[str, Schema]]) -> dict[str, Schema]:
    """Each property with what all members say of it: where they differ, the model itself decides."""
    first, *others = members
    return {
        name: {
            key: value
            for key, value in said.items()
            if all(other[name].get(key) == value for other in others)
        }
        for name, said in first.items()
    }
