"""Settings as people write them: YAML files, changed by key=value words; errors that they can act on.

YAML has texts, numbers, lists and groups, as JSON has. No key may stand twice: YAML itself takes the
last one. A date is the text that it is.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from configs.base import SettingsOrigin
from configs.cluster import ClusterConfig
from configs.settings_help import SettingPlace, like, place_of

Config = TypeVar("Config", bound=BaseModel)
SUITES = "evaluation.suites"


class KeyTwice(ValueError):
    """A key stands twice in one mapping; says which, and in which lines."""


def read_yaml(text: str) -> Any:
    """The value of a YAML document. Raises KeyTwice, yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)
    except KeyTwice:
        raise
    except (ValueError, KeyError) as error:  # a number without digits, a tag and another value
        raise yaml.YAMLError(str(error)) from None
    except RecursionError:
        raise yaml.YAMLError("its groups are too deep") from None


KINDS = ("null", "bool", "int", "float", "str", "seq", "map")


class _Loader(yaml.SafeLoader):
    # The entry of None refuses a tag that has none of its own.
    yaml_constructors: ClassVar = {
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in KINDS
    }
    yaml_implicit_resolvers = {  # noqa: RUF012 (the stubs have it of an instance)
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # the stubs' type is wrong
        """As read, before merges (`<<`) put other mappings' keys beside its own."""
        node = super().compose_mapping_node(anchor)
        lines: dict[Hashable, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            name, line = self.construct_object(key), key.start_mark.line + 1
            if name in lines:
                raise KeyTwice(
                    f"the key {key.value} stands twice in one group, in line {lines[name]} and in "
                    f"line {line}"
                )
            lines[name] = line
        return node


class ConfigError(ValueError):
    """The user's settings are wrong; the message is one clear sentence for each mistake."""


def change(
    model: type[Config],
    settings: Mapping[str, Any],
    overrides: Sequence[str],
    folder: Path | None = None,
) -> Config:
    """Plain settings with key=value overrides applied, checked.

    folder: where files that the settings name are looked for first; None: in the working folder.
    """
    raw = changed(settings, overrides)
    if folder is None:
        return validate(model, raw)
    named = {path for word in overrides for path in _paths(value_of(word.partition("=")[2]))}
    return validate(model, raw, SettingsOrigin(folder=str(folder), words=frozenset(named)))


def changed(settings: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Plain settings with key=value overrides applied, not checked."""
    raw = copy.deepcopy(dict(settings))
    words = sorted(overrides, key=_turn)
    kinds = {word.partition("=")[0] for word in words if _turn(word) == 1}
    for word in words:
        group, _, name = word.partition("=")[0].rpartition(".")
        if name == "path" and _is_model(group) and f"{group}.kind" not in kinds:
            apply_word(raw, f"{group}.kind=pretrained")
        apply_word(raw, word)
    _fit_shards(raw, {word.partition("=")[0] for word in words})
    return raw


def _paths(value: Any) -> Iterator[str]:
    """The texts of a value, and what stands before the name of a function."""
    if isinstance(value, str):
        yield from (value, value.rpartition(":")[0])
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _paths(inner)


def _fit_shards(raw: dict[str, Any], keys: Collection[str]) -> None:
    """Leave out a recipe's shards where the words, which name none, ask for what they do not fit."""
    prompts, rollout = raw.get("prompts_per_step"), raw.get("rollout")
    if "rollout.shards" in keys or not isinstance(rollout, dict) or not isinstance(prompts, int):
        return
    shards, over = rollout.get("shards"), "rollout.over_sampling" in keys
    if isinstance(shards, int) and (over or ("prompts_per_step" in keys and shards > prompts)):
        del rollout["shards"]


def _turn(word: str) -> int:
    """Which suites there are first, then a kind, which drops the settings of the one before.

    The path of a model is its kind too: a model with one is a pretrained one.
    """
    key = word.partition("=")[0]
    group, _, name = key.rpartition(".")
    if key == SUITES:
        return 0
    if name == "kind":
        return 1
    return 2 if name == "path" and _is_model(group) else 3


def _is_model(group: str) -> bool:
    return group.rpartition(".")[2] == "model"


def validate(
    model: type[Config], raw: Mapping[str, Any], origin: SettingsOrigin | None = None
) -> Config:
    """Check plain settings against a model; ConfigError with one line for each mistake."""
    try:
        return model.model_validate(raw, context=origin)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(model, item) for item in error.errors())) from None


def filled_in(
    model: type[BaseModel], settings: Mapping[str, Any], words: Sequence[str]
) -> dict[str, Any]:
    """Plain settings with key=value words applied, as a form begins with: some may be missing yet.

    ConfigError for what is wrong in those that are there.
    """
    raw, errors = _tried(model, settings, words)
    if wrong := [_sentence(model, item) for item in errors if item["type"] != "missing"]:
        raise ConfigError("\n".join(wrong))
    return raw


def no_such_settings(
    model: type[BaseModel], settings: Mapping[str, Any], words: Sequence[str]
) -> list[str]:
    """A sentence for each of the words that names no setting, of any kind and whatever its value."""
    _, errors = _tried(model, settings, words)
    extra = [item for item in errors if item["type"] == "extra_forbidden"]
    return [
        _sentence(model, item)
        for item in extra
        if not place_of(model, item["loc"]).kinds_with(str(item["loc"][-1]))
    ]


def _tried(
    model: type[BaseModel], settings: Mapping[str, Any], words: Sequence[str]
) -> tuple[dict[str, Any], Sequence[Any]]:
    """Plain settings with words applied, and pydantic's errors of them."""
    raw = copy.deepcopy(dict(settings))
    for word in sorted(words, key=_turn):
        apply_word(raw, word)
    try:
        model.model_validate(raw)
    except ValidationError as error:
        return raw, error.errors()
    return raw, ()


def apply_word(raw: dict[str, Any], word: str) -> None:
    """Put a setting key=value into plain settings, in place; ConfigError where it has no place."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"{word} is no setting. Write key=value, such as train.learning_rate=1e-6."
        )
    if "[]" in key:  # as messages name a setting of any of them
        raise ConfigError(
            f"{key}: [] stands for the number of one. Write {key.replace('[]', '.0')}=… for the "
            "first."
        )
    try:
        value = value_of(text)
    except KeyTwice as error:
        raise ConfigError(f"{word}: {error}. Remove one.") from None
    if key.startswith("cluster.pools.") and "pools" not in raw.get("cluster", {}):
        raw.setdefault("cluster", {})["pools"] = ClusterConfig().model_dump()["pools"]
    if key.startswith(f"{SUITES}.") and isinstance(raw.get("evaluation"), dict):
        suites = raw["evaluation"].get("suites")
        if isinstance(suites, list):  # of names
            raw["evaluation"]["suites"] = {str(name): {} for name in suites}
    *parents, last = key.split(".")
    place: Any = raw
    for position, parent in enumerate(parents):
        empty: Any = [] if key.split(".")[position + 1] == "0" else {}
        if isinstance(place, list):
            index = _index(parent, place, word)
            if index == len(place):
                place.append(empty)
            place = place[index]
            continue
        if place.get(parent) is None:  # null in a recipe too
            place[parent] = empty
        inner = place[parent]
        if not isinstance(inner, dict | list):
            raise ConfigError(
                f"{word}: {'.'.join(parents[: position + 1])} is a single value, not a group."
            )
        place = inner
    if isinstance(place, list):
        index = _index(last, place, word)
        place[index : index + 1] = [value]
    else:
        if key == "cluster.kind":  # all kinds share their settings, but for this one
            place.pop("address", None)
        elif last == "kind" and place.get("kind") != value:
            place.clear()
        place[last] = value


def value_of(text: str) -> Any:
    """What stands after the equals sign, read as YAML."""
    try:
        value = read_yaml(text)
    except yaml.YAMLError:
        value = text
    return _number(text) if value == text else value  # a number in quotes is a text


def _number(text: str) -> str | float:
    """YAML 1.1 reads 1e-6 as a string; people mean a number."""
    try:
        return float(text) if text[:1] in "+-.0123456789" else text
    except ValueError:
        return text


def _index(text: str, place: list[Any], word: str) -> int:
    """A position in a list, or the one after its last, where something is added."""
    if not text.isdecimal() or int(text) > len(place):
        raise ConfigError(
            f"{word}: {text} is no position in a list of {len(place)}. They count from 0, and "
            f"{len(place)} adds one."
        )
    return int(text)


# pydantic's types of a mistake: one value in place of a group, a mapping or a list of them.
NO_GROUP = ("model_type", "model_attributes_type", "dict_type", "list_type", "tuple_type")


def _sentence(model: type[BaseModel], item: Any) -> str:
    place = place_of(model, item["loc"])
    path = place.path
    group, _, name = path.rpartition(".")
    if item["type"] == "extra_forbidden":
        if others := place.kinds_with(name):
            return (
                f"{path}: {group}.kind = {place.kind} has no such setting. Set {group}.kind to "
                f"{_or(others)}, or remove it."
            )
        near = like(model, path)
        hint = f" Did you mean {near}?" if near else " See --help for all settings."
        return f"{path}: there is no such setting.{hint}"
    if item["type"] == "too_short":
        return f"{path} is empty, and it needs {item['ctx']['min_length']} or more. Set {path}."
    if item["type"] == "missing":
        return f"{path}: a value is needed. Set {path}=…"
    if item["type"] == "union_tag_not_found":
        return f"{path}.kind: a value is needed. Set {path}.kind to {_or(place.kinds)}."
    if item["type"] == "union_tag_invalid":
        kinds = place.kinds
        alike = difflib.get_close_matches(str(item["ctx"]["tag"]), kinds, n=1)
        hint = f" Did you mean {alike[0]}?" if alike else ""
        return f"{path}.kind = {item['ctx']['tag']}: it must be {_or(kinds)}.{hint}"
    if item["type"] in NO_GROUP:
        return (
            f"{path} = {item['input']!r}: it is {place.form}. Set {_inside(place, item['input'])}."
        )
    if item["type"] == "string_pattern_mismatch" and place.meaning:
        pattern, meaning = item["ctx"]["pattern"], place.meaning.partition(". ")[0].rstrip(".")
        return f"{path} = {item['input']!r} is not of the form {pattern}. It is: {meaning}."
    message = item["msg"].removeprefix("Value error, ")
    if not path or item["type"] == "value_error":
        return message
    return f"{path} = {item['input']!r}: {message[0].lower()}{message[1:]}."


def _inside(place: SettingPlace, value: object) -> str:
    """What to set instead of one value for a whole group or list."""
    inner, kinds = place.inner
    if not kinds:
        return f"what is in it, such as {inner}"
    return f"{inner} = {value}" if value in kinds else f"{inner} to {_or(kinds)}"


def _or(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a file, by name; ConfigError says in one sentence why it holds none."""
    try:
        settings = read_yaml(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"There is no file {path}. Give the path of a YAML file.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder. Give the path of a YAML file.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, yaml.reader.ReaderError):
        raise ConfigError(f"{path} is no text. Give a YAML file, in UTF-8.") from None
    except KeyTwice as error:
        raise ConfigError(f"{path}: {error}. Remove one.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {_why(error)}.") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds no settings: its top level must be key: value lines.")
    if wrong := next((name for name in settings if not isinstance(name, str)), None):
        raise ConfigError(f"{path}: {wrong!r} is no name of a setting. Write it as a word.")
    return settings


def _why(error: yaml.YAMLError) -> str:
    """What is wrong, and in which line where that is known."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error).splitlines()[0]
    place = f"in line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    if "'\\t'" in (error.problem or ""):
        return f"{place} is a tab. Indent with spaces"
    return f"{error.problem or error.context}, {place}"
