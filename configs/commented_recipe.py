"""A recipe as a file to begin one's own with: a comment says what each setting is."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError, changed, read_settings
from configs.recipe import find_recipe, read_recipe
from configs.recipe_files import flow_of, remarks
from configs.settings_help import groups_of, kind_of

WIDTH = 96  # characters of a line


def commented_recipe(
    recipe: str,
    words: Sequence[str],
    flows: Sequence[str],
    model_of: Callable[[str], type[GRPOConfig]],
) -> str:
    """A recipe with key=value overrides, for the flow that it names, or the first that takes it.

    flows: by name. model_of: the class of a flow's settings. Raises ConfigError as the first flow
    that is asked does, if none takes the settings.
    """
    path = find_recipe(recipe)
    faults, first = [], flow_of(path)
    for name in sorted(flows, key=lambda flow: flow != first):
        model = model_of(name)
        try:
            read_recipe(model, recipe, words)
        except ConfigError as error:
            faults.append(error)
            continue
        head = [*remarks(path), "", f"This file: refrain {name} FILE"]
        lines = "".join(f"# {line}".rstrip() + "\n" for line in head)
        return f"{lines}\n{commented(model, changed(read_settings(path), words))}"
    raise faults[0]


def commented(model: type[BaseModel], settings: Mapping[str, Any]) -> str:
    """Settings, such as a recipe's, as YAML with what each means above it.

    Args:
        model: Of the settings, which are good.
        settings: As YAML gives them; what they leave out stays out.
    """
    return "\n".join(_group(model, settings, "")) + "\n"


def _group(model: type[BaseModel], settings: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in settings.items():
        field = model.model_fields[name]
        groups = list(groups_of(field.annotation))
        yield from _comment(_meaning(field, groups), indent)
        yield from _setting(name, value, groups, indent)


def _setting(name: str, value: Any, groups: list[type[BaseModel]], indent: str) -> Iterator[str]:
    deeper = f"{indent}  "
    if groups and isinstance(value, Mapping) and (inner := _chosen(groups, value)):
        yield f"{indent}{name}:"
        yield from _group(inner, value, deeper)
    elif groups and isinstance(value, Mapping) and value:  # groups by names of the user's
        yield f"{indent}{name}:"
        for key, item in value.items():
            yield from _setting(str(key), item, groups, deeper)
    elif (
        groups
        and isinstance(value, list)
        and all(_chosen(groups, item) for item in value)
        and value
    ):
        yield f"{indent}{name}:"
        for item in value:
            inner = _chosen(groups, item)
            assert inner is not None
            lines = list(_group(inner, item, f"{deeper}  "))
            first = next(i for i, line in enumerate(lines) if not line.lstrip().startswith("#"))
            lines[first] = f"{deeper}- {lines[first].lstrip()}"
            yield from lines
    else:
        written = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
        yield f"{indent}{name}: {written.removesuffix('...' + chr(10)).strip()}"


def _chosen(groups: list[type[BaseModel]], value: Any) -> type[BaseModel] | None:
    """The group whose settings these are; None where they are none's."""
    if not isinstance(value, Mapping):
        return None
    fitting = [group for group in groups if value.keys() <= group.model_fields.keys()]
    kinds = [group for group in fitting if kind_of(group) == value.get("kind", kind_of(group))]
    return next(iter(kinds), None)


def _meaning(field: FieldInfo, groups: list[type[BaseModel]]) -> str:
    if field.description:
        return field.description
    return (groups[0].__doc__ or "").strip().partition("\n")[0] if len(groups) == 1 else ""


def _comment(text: str, indent: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
    )
