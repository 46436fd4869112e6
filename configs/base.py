"""The base of every settings model, how settings name a user's functions and files, and their form.

A choice by name is a model whose `kind` is the name and whose fields are its parameters.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
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


# Settings as JSON schema for a form: their order, choices as tabs, names as people write them.
#
# Prefect 3.7's form sorts by `position`, on each level; without, the order is the database's, which
# on Postgres is that of the names' lengths. It shows `anyOf` as tabs and knows no `oneOf` (not
# reported there). It chooses a value's tab by the names of its properties alone, so fewer properties
# come first, and choices with the same properties share a tab, where `kind` is a drop-down. In a list
# it shows no tabs, and of many the last run out of the page: there a choice is one group with the
# settings of all.

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


PLAIN = ("string", "integer", "number")


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
