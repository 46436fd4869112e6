"""Every setting of a config class with its type, default and meaning, for --help."""

from __future__ import annotations

from collections.abc import Iterator
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
