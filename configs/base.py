"""The base of every settings model: frozen, strict about unknown keys, no environment reads."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen group of settings; an unknown key is an error, a description stands on each field."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
