"""The base of every settings model, and how settings name a user's own functions and files."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from configs.form import title_of, with_tabs


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
        found: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name in self.later and value == field.get_default(call_default_factory=True):
                found[name] = True
            elif isinstance(value, Settings):
                found[name] = value._unset_later()
            elif isinstance(value, Mapping):
                groups = ((key, one) for key, one in value.items() if isinstance(one, Settings))
                found[name] = {key: one._unset_later() for key, one in groups}
        return {name: unset for name, unset in found.items() if unset}

    @model_validator(mode="before")
    @classmethod
    def _kinds_by_default(cls, given: Any) -> Any:
        """A group that names no kind has that which it would have if left out.

        So algorithm.loss.clip_high can be set alone.
        """
        if not isinstance(given, Mapping):
            return given
        changed = {}
        for name, value in given.items():
            field = cls.model_fields.get(name)
            if field is not None and isinstance(value, Mapping) and "kind" not in value:
                default = field.get_default(call_default_factory=True)
                if isinstance(default, Settings) and "kind" in type(default).model_fields:
                    changed[name] = {"kind": default.model_dump(include={"kind"})["kind"], **value}
        return {**given, **changed} if changed else given

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        found = handler.resolve_ref_schema(handler(core_schema))
        found.update(with_tabs(found, handler.resolve_ref_schema, cls.form_first))
        return found


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
    seen = _seen(path, info)
    return seen if os.path.exists(seen) else path


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
