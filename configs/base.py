"""The base of every settings model, and how settings name a user's own function."""

import os
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler
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
