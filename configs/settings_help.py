"""Every setting of a class with its type, default and meaning, and where it is by its name.

A setting's place goes from pydantic's location of a mistake to the name that a person writes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Every setting as (dotted name, type, default, meaning), depth first."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner = list(groups_of(field.annotation))
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


def groups_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """Settings models that a field holds: itself, in a union, in a list or in a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Annotated, Union, UnionType, tuple, list, dict):
        for part in get_args(annotation):
            if not isinstance(part, str):
                yield from groups_of(part)


def _type_name(annotation: Any) -> str:
    """A type as people write it: `int | None`, without what is checked of it."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(parts[0])
    if origin is Literal:
        return f"one of {list(parts)}"
    if origin in (Union, UnionType):
        return " | ".join(map(_type_name, parts))
    if origin in (tuple, list, dict):
        return f"{origin.__name__}[{', '.join(map(_type_name, parts))}]"
    if annotation in (None, type(None)):
        return "None"
    return "..." if annotation is Ellipsis else str(annotation.__name__)


def _default(field: Any) -> str:
    if field.default_factory is not None:
        value = field.default_factory()
        return "" if isinstance(value, BaseModel | dict) and value else str(value)
    if field.default is PydanticUndefined:
        return "(needed)"
    return "" if isinstance(field.default, BaseModel) else str(field.default)


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingPlace:
    """A setting, as `key=value` names it."""

    path: str  # dotted: rewards.functions.0.path
    choices: tuple[
        type[BaseModel], ...
    ]  # the kinds of the group that it is or, if it is none, is in
    kind: str | None  # of its group, where that has one
    annotation: Any  # of what it holds; None: it is no setting
    meaning: str  # its description

    def kinds_with(self, name: str) -> list[str]:
        """The other kinds of its group that have a setting of that name."""
        return [
            kind_of(choice)
            for choice in self.choices
            if name in choice.model_fields and kind_of(choice) != self.kind
        ]

    @property
    def kinds(self) -> list[str]:
        """All kinds of its group."""
        return [kind_of(choice) for choice in self.choices]

    @property
    def form(self) -> str:
        """What holds its settings, for people."""
        many, _ = _unwrapped(self.annotation)
        if many is None:
            return "a group of settings"
        return "a group of names" if many is dict else "a list"

    @property
    def inner(self) -> tuple[str, list[str]]:
        """A setting inside the group, list or mapping that it is, and the kinds that it can be."""
        many, _ = _unwrapped(self.annotation)
        path = self.path + ("" if many is None else ".NAME" if many is dict else ".0")
        groups = list(groups_of(self.annotation))
        if not groups:
            return path, []
        if kinds := list(filter(None, map(kind_of, groups))):
            return f"{path}.kind", kinds
        return f"{path}.{next(iter(groups[0].model_fields))}", []


def place_of(model: type[BaseModel], location: Sequence[int | str]) -> SettingPlace:
    """The setting at a location of pydantic's, in which the kind of a group is a part of its own.

    A part that is no setting, as the name of a type in a union, is left out.
    """
    parts: list[str] = []
    meaning = ""
    choices: tuple[type[BaseModel], ...] = ()
    kind: str | None = None
    here: Any = model
    for part in location:
        groups = tuple(groups_of(here))
        if _is_union_of_groups(here):
            chosen = {kind_of(group): group for group in groups}
            if part in chosen:
                choices, kind, here = groups, str(part), chosen[str(part)]
                continue
        many, plain = _unwrapped(here)
        if many is not None and (isinstance(part, int) or many is dict):
            parts.append(str(part))
            here = (*get_args(plain), Any)[1 if many is dict else 0]
            choices, kind = (), None
        elif isinstance(plain, type) and issubclass(plain, BaseModel):
            parts.append(str(part))
            field = plain.model_fields.get(str(part))
            if plain not in choices:
                choices, kind = (), None
            here = None if field is None else field.annotation
            meaning = "" if field is None else field.description or ""
        elif here is None:
            parts.append(str(part))
    if _is_union_of_groups(here):
        choices, kind = tuple(groups_of(here)), None
    return SettingPlace(
        path=".".join(parts), choices=choices, kind=kind, annotation=here, meaning=meaning
    )


def like(model: type[BaseModel], path: str) -> str | None:
    """A setting that is probably meant by a name which is none; None where no name is near it."""
    names = dict.fromkeys(_as_in(path, name) for name, *_ in fields(model) if " " not in name)
    *groups, last = path.split(".")
    for depth in reversed(range(len(groups) + 1)):  # in a group around it
        if (outer := ".".join([*groups[:depth], last])) in names:
            return outer
    same = [name for name in names if name.rpartition(".")[2] == last]
    if len(same) == 1:
        return same[0]
    near = difflib.get_close_matches(path, names, n=1, cutoff=0.6)
    return near[0] if near else None


def kind_of(choice: type[BaseModel]) -> str:
    """The kind by which a group is chosen; empty where it is not one of several."""
    field = choice.model_fields.get("kind")
    return "" if field is None else str(field.default)


def _as_in(path: str, name: str) -> str:
    """A setting's name with a list's number and a mapping's key as a path has them."""
    parts = name.split(".")
    for position, (theirs, ours) in enumerate(zip(path.split("."), parts, strict=False)):
        if ours == "NAME" or (ours == "0" and theirs.isdigit()):
            parts[position] = theirs
        elif ours != theirs:
            break
    return ".".join(parts)


def _unwrapped(annotation: Any) -> tuple[type | None, Any]:
    """What holds many (tuple, list, dict) or None, and the type without None and annotations."""
    if get_origin(annotation) is Annotated:
        return _unwrapped(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        inner = [part for part in get_args(annotation) if part is not type(None)]
        return _unwrapped(inner[0]) if len(inner) == 1 else (None, annotation)
    origin = get_origin(annotation)
    return (origin if origin in (tuple, list, dict) else None), annotation


def _is_union_of_groups(annotation: Any) -> bool:
    many, plain = _unwrapped(annotation)
    return many is None and get_origin(plain) in (Union, UnionType) and any(groups_of(plain))
