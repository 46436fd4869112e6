"""Recipes: YAML files of settings, changed by key=value words, with errors a person can act on."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from configs.cluster import ClusterConfig

FOLDER = Path(__file__).parent
DEMO = "smollm2-arithmetic"

Config = TypeVar("Config", bound=BaseModel)


class ConfigError(ValueError):
    """The user's settings are wrong; the message is one clear sentence for each mistake."""


def names() -> list[str]:
    """Names of the recipes that come with Refrain."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(recipe: str) -> Path:
    """The file of a recipe given by name or path; ConfigError if there is none."""
    for path in (Path(recipe), FOLDER / f"{recipe}.yaml"):
        if path.is_file():
            return path
    raise ConfigError(
        f"There is no recipe {recipe}. Give the path of a YAML file, or one of: {', '.join(names())}."
    )


def load(model: type[Config], recipe: str = DEMO, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe, apply key=value overrides in order, and check the whole.

    Values are read as YAML, so steps=5, train.learning_rate=1e-6 and rollout.stop=[a,b] work.
    """
    path = find(recipe)
    try:
        raw = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {str(error).splitlines()[0]}.") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no settings: its top level must be key: value lines.")
    return change(model, raw, overrides)


def change(model: type[Config], settings: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """Plain settings with key=value overrides applied, checked."""
    raw = copy.deepcopy(dict(settings))
    # Kinds first: a new kind drops the settings that the recipe gave the old one.
    for word in sorted(overrides, key=lambda word: not word.partition("=")[0].endswith("kind")):
        _apply(raw, word)
    return validate(model, raw)


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
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if value == text:  # and not in quotes
        value = _number(text)
    if key.startswith("cluster.pools.") and "pools" not in raw.get("cluster", {}):
        raw.setdefault("cluster", {})["pools"] = ClusterConfig().model_dump()["pools"]
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


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Every setting as (dotted name, type, default, meaning), depth first."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner = list(_direct(field.annotation))
        if inner:
            many = get_origin(field.annotation) in (tuple, list)
            keyed = get_origin(field.annotation) is dict
            place = path + (".0" if many else ".NAME" if keyed else "")
            if len(inner) == 1 and not many and not keyed:
                yield from fields(inner[0], f"{place}.")
                continue
            yield path, "", _default(field), field.description or ""
            for choice in inner:
                yield from _choice(choice, place)
        else:
            yield path, _type_name(field.annotation), _default(field), field.description or ""


def _choice(choice: type[BaseModel], place: str) -> Iterator[tuple[str, str, str, str]]:
    kind = choice.model_fields.get("kind")
    if kind is not None:
        yield f"{place}.kind = {kind.default}", "", "", (choice.__doc__ or "").strip()
    for line in fields(choice, f"{place}."):
        if line[0] != f"{place}.kind":
            yield line


def _direct(annotation: Any) -> Iterator[type[BaseModel]]:
    """Settings models that a field holds: itself, in a union, in a list or in a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Annotated, Union, UnionType, tuple, list, dict):
        for part in get_args(annotation):
            if not isinstance(part, str):
                yield from _direct(part)


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("Literal", "one of ")


def _default(field: Any) -> str:
    if field.default_factory is not None:
        value = field.default_factory()
        return "" if isinstance(value, BaseModel | dict) and value else str(value)
    if field.default is PydanticUndefined:
        return "(needed)"
    return "" if isinstance(field.default, BaseModel) else str(field.default)
