"""The base of every settings model, and how settings name a user's own function."""

import os
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
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
        found.update(with_tabs(found, handler.resolve_ref_schema))
        return found


def located(path: str) -> str:
    """An import path whose file, if it names one, is absolute: seen from the working folder."""
    place, _, name = path.rpartition(":")
    if not place.endswith(".py"):
        return path
    return f"{os.path.abspath(os.path.expanduser(place))}:{name}"


FunctionPath = Annotated[
    str,
    Field(
        pattern=r"^([\w.]+|.+\.py):[\w.]+$",
        description="The function: package.module:NAME, or path/to/file.py:NAME. A file has to be "
        "under the same path on every machine that runs workers.",
    ),
    AfterValidator(located),
]
