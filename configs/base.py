"""The base of every settings model: frozen, strict about unknown keys, no environment reads."""

from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
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
