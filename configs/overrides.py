"""Plain settings changed by key=value words, and errors that a person can act on."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from configs.cluster.cluster import ClusterConfig
from configs.settings_help import fields
from configs.yaml_text import KeyTwice, read_yaml

Config = TypeVar("Config", bound=BaseModel)
SUITES = "evaluation.suites"


class ConfigError(ValueError):
    """The user's settings are wrong; the message is one clear sentence for each mistake."""


def change(model: type[Config], settings: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """Plain settings with key=value overrides applied, checked."""
    raw = copy.deepcopy(dict(settings))
    for word in sorted(overrides, key=_turn):
        _apply(raw, word)
    return validate(model, raw)


def _turn(word: str) -> int:
    """Which suites there are before settings of one; a kind before what it has: it drops the old."""
    key = word.partition("=")[0]
    return 0 if key == SUITES else 1 if key.endswith("kind") else 2


def validate(model: type[Config], raw: Mapping[str, Any]) -> Config:
    """Check plain settings against a model; ConfigError with one line for each mistake."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(model, item) for item in error.errors())) from None


def _apply(raw: dict[str, Any], word: str) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"{word} is no setting. Write key=value, such as train.learning_rate=1e-6."
        )
    try:
        value = read_yaml(text)
    except KeyTwice as error:
        raise ConfigError(f"{word}: {error}. Remove one.") from None
    except yaml.YAMLError:
        value = text
    if value == text:  # and not in quotes
        value = _number(text)
    if key.startswith("cluster.pools.") and "pools" not in raw.get("cluster", {}):
        raw.setdefault("cluster", {})["pools"] = ClusterConfig().model_dump()["pools"]
    if key.startswith(f"{SUITES}.") and isinstance(raw.get("evaluation"), dict):
        suites = raw["evaluation"].get("suites")
        if isinstance(suites, list):  # of names
            raw["evaluation"]["suites"] = {str(name): {} for name in suites}
    *parents, last = key.split(".")
    place: Any = raw
    for position, parent in enumerate(parents):
        if isinstance(place, list):
            place = place[_index(parent, place, word)]
            continue
        inner = place.setdefault(parent, {})
        if not isinstance(inner, dict | list):
            raise ConfigError(
                f"{word}: {'.'.join(parents[: position + 1])} is a single value, not a group."
            )
        place = inner
    if isinstance(place, list):
        place[_index(last, place, word)] = value
    else:
        if key == "cluster.kind":  # all kinds share their settings, but for this one
            place.pop("address", None)
        elif last == "kind" and place.get("kind") != value:
            place.clear()
        place[last] = value


def _number(text: str) -> str | float:
    """YAML 1.1 reads 1e-6 as a string; people mean a number."""
    try:
        return float(text) if text[:1] in "+-.0123456789" else text
    except ValueError:
        return text


def _index(text: str, place: list[Any], word: str) -> int:
    if not text.isdigit() or int(text) >= len(place):
        raise ConfigError(
            f"{word}: {text} is no position in a list of {len(place)}; they count from 0."
        )
    return int(text)


def _sentence(model: type[BaseModel], item: Any) -> str:
    known = {path for path, *_ in fields(model)}
    key = ".".join(str(part) for part in item["loc"])
    plain = ".".join(
        str(part)
        for part in item["loc"]
        if part not in _tags(model) or str(part) == item["loc"][-1]
    )
    if item["type"] == "extra_forbidden":
        if plain in known:
            group = plain.rpartition(".")[0]
            return f"{plain}: {group} has no such setting with this {group}.kind. Remove it."
        near = difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
        hint = f" Did you mean {near[0]}?" if near else " See --help for all settings."
        return f"{plain}: there is no such setting.{hint}"
    if item["type"] == "missing":
        return f"{plain}: a value is needed. Set {plain}=…"
    if item["type"] == "union_tag_invalid":
        given, choices = item["ctx"]["tag"], item["ctx"]["expected_tags"]
        return f"{plain}.kind = {given!r}: it must be one of {choices}."
    message = item["msg"].removeprefix("Value error, ")
    if not key:
        return message
    if item["type"] == "value_error":
        return message
    return f"{plain} = {item['input']!r}: {message[0].lower()}{message[1:]}."


def _tags(model: type[BaseModel]) -> set[str]:
    """The discriminator values that pydantic puts into error locations."""
    found = set()
    for inner in _models(model):
        kind = inner.model_fields.get("kind")
        if kind is not None and isinstance(kind.default, str):
            found.add(kind.default)
    return found


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from _models(field.annotation)
    elif get_origin(annotation) in (Annotated, Union, UnionType, tuple, list, dict):
        for part in get_args(annotation):
            if not isinstance(part, str):
                yield from _models(part)
