"""The base of every settings model, and how settings name a user's functions and files.

A choice by name is a model whose `kind` is the name and whose fields are its parameters.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from configs.form import FORM, title_of, with_tabs


def _title(name: str, field: Any) -> str:
    return title_of(name)


class Settings(BaseModel):
    """A frozen group of settings; an unknown key is an error, a description stands on each field."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, field_title_generator=_title
    )
    form_first: ClassVar[tuple[str, ...]] = ()  # settings that the form shows before the others
    # Settings that came later: keys that stored runs were written under do not know them.
    later: ClassVar[frozenset[str]] = frozenset()

    def in_keys(self, exclude: Collection[str] = ()) -> dict[str, Any]:
        """The settings as keys of stored objects are made of them.

        Those that came later are left out where they are at their defaults, so that what an older
        Refrain has stored is found again.
        """
        return self.model_dump(
            mode="json", exclude={**self._unset_later(), **dict.fromkeys(exclude, True)}
        )

    def _unset_later(self) -> dict[str, Any]:
        """Settings that came later, here and in groups of settings, and are at their defaults."""
        later: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name in self.later and value == field.get_default(call_default_factory=True):
                later[name] = True
            elif isinstance(value, Settings):
                later[name] = value._unset_later()
            elif isinstance(value, Mapping):
                groups = (
                    (key, group) for key, group in value.items() if isinstance(group, Settings)
                )
                later[name] = {key: group._unset_later() for key, group in groups}
        return {name: inner for name, inner in later.items() if inner}

    @model_validator(mode="before")
    @classmethod
    def _kinds_by_default(cls, settings: Any) -> Any:
        """A group that names no kind has that which it would have if left out.

        So algorithm.loss.clip_high can be set alone.
        """
        if not isinstance(settings, Mapping):
            return settings
        changed = {}
        for name, value in settings.items():
            field = cls.model_fields.get(name)
            if field is not None and isinstance(value, Mapping) and "kind" not in value:
                default = field.get_default(call_default_factory=True)
                if isinstance(default, Settings) and "kind" in type(default).model_fields:
                    changed[name] = {"kind": default.model_dump(include={"kind"})["kind"], **value}
        return {**settings, **changed} if changed else settings

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        if not FORM.get():
            return handler(core_schema)
        schema = handler.resolve_ref_schema(handler(core_schema))
        schema.update(with_tabs(schema, handler.resolve_ref_schema, cls.form_first))
        return schema


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingsOrigin:
    """Where settings come from: the context in which they are validated."""

    folder: str  # of the recipe; what it names is looked for there first
    words: frozenset[str]  # paths on the command line, which are seen from the working folder


def _seen(path: str, info: ValidationInfo) -> str:
    """A file's absolute path: beside its recipe, if it is there, else from the working folder."""
    here, origin = os.path.abspath(os.path.expanduser(path)), info.context
    if isinstance(origin, SettingsOrigin):
        beside = os.path.abspath(os.path.join(origin.folder, os.path.expanduser(path)))
        if os.path.exists(beside) and not (path in origin.words and os.path.exists(here)):
            return beside
    return here


def _function(path: str, info: ValidationInfo) -> str:
    """An import path; its file, if it names one, as an absolute path."""
    place, _, name = path.rpartition(":")
    return f"{_seen(place, info)}:{name}" if place.endswith(".py") else path


def _address(path: str, info: ValidationInfo) -> str:
    """An fsspec address as it is; a path as an absolute one."""
    return path if "://" in path else _seen(path, info)


def _program(name: str, info: ValidationInfo) -> str:
    """A program's name, for the PATH, as it is; a path as an absolute one."""
    return _seen(name, info) if "/" in name else name


def _model(path: str, info: ValidationInfo) -> str:
    """A hub id or the like as it is; a path to what exists as an absolute one."""
    absolute = _seen(path, info)
    return absolute if os.path.exists(absolute) else path


LocalFile = Annotated[str, AfterValidator(_seen)]
FileAddress = Annotated[str, AfterValidator(_address)]
ProgramPath = Annotated[str, AfterValidator(_program)]
ModelPath = Annotated[str, AfterValidator(_model)]


FunctionPath = Annotated[
    str,
    Field(
        pattern=r"^([\w.]+|.+\.py):[\w.]+$",
        description="The function: package.module:NAME, or path/to/file.py:NAME. A file has to be "
        "under the same path on every machine that runs workers. One of a recipe is looked for "
        "beside it first, then in the working folder.",
    ),
    AfterValidator(_function),
]


OWN = {"configs", "engines", "flows", "storage", "tasks"}  # Refrain's packages


class Method(Settings):
    """A choice by name; `arguments` are the keyword arguments of the function of that name."""

    def arguments(self) -> dict[str, Any]:
        """Field name -> value, without the name of the method."""
        return self.model_dump(exclude={"kind"})


class UserFunction(Method):
    """A user's own function, by import path; it has the signature of the built-in ones."""

    kind: Literal["function"] = "function"
    path: FunctionPath
    params: dict[str, int | float | bool | str] = Field(
        default_factory=dict, description="Keyword arguments passed on every call."
    )

    def arguments(self) -> dict[str, Any]:
        """The user's own keyword arguments."""
        return dict(self.params)

    @field_validator("path")
    @classmethod
    def _exists(cls, path: str) -> str:
        return found_path(path)


def found_path(path: str) -> str:
    """The import path, if there is such a name; ValueError else.

    The module's text is read, not run: the process that loads a config stays free of torch.
    """
    place, _, name = path.rpartition(":")
    file = place if place.endswith(".py") else _file_of(place, path)
    if file is None or not file.endswith(".py"):
        return path
    try:
        with open(file, encoding="utf-8") as source:
            tree = ast.parse(source.read(), file)
    except FileNotFoundError:
        raise ValueError(f"there is no file '{file}'. Check '{path}'.") from None
    except SyntaxError as error:
        raise ValueError(f"'{file}' is not Python: {error}.") from None
    names = _names(tree)
    first = name.split(".")[0]
    if first not in names and "*" not in names:
        kind = "file" if file == place else "module"
        raise ValueError(f"{kind} '{place}' has no '{first}'. Check '{path}'.")
    if file == place:
        _refuse_taken_names(tree, Path(file))
    return path


def _file_of(module: str, path: str) -> str | None:
    """The file of a module; None where it has none, ValueError where there is no module."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise ValueError(
            f"no module '{module}' is found for '{path}'. Install it, start from its folder, or "
            "name its file: path/to/file.py:NAME."
        )
    return spec.origin


def _refuse_taken_names(tree: ast.Module, file: Path) -> None:
    """ValueError where a file imports a neighbour whose name is one of Refrain's own packages.

    Such a file is loaded into processes that have those packages, so it would get them.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            modules = [node.module]
        else:
            continue
        for name in {module.partition(".")[0] for module in modules} & OWN:
            beside = (file.with_name(name), file.with_name(f"{name}.py"))
            if any(path.exists() for path in beside):
                raise ValueError(
                    f"'{file}' imports '{name}', which is a package of Refrain's and a neighbour of "
                    "the file: it would get Refrain's. Give the neighbour another name."
                )


def _names(tree: ast.Module) -> set[str]:
    """Names that the module's text defines or imports anywhere outside functions and classes."""
    names: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                names.add(node.id)
        else:
            pending += list(ast.iter_child_nodes(node))
    return names
