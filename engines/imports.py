"""Users' own functions by import path."""

from __future__ import annotations

import importlib
from typing import Any


def imported(path: str) -> Any:
    """The object at `package.module:name`; ValueError if there is none."""
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = vars(found)[part]
    except (ModuleNotFoundError, KeyError) as error:
        raise ValueError(
            f"nothing is found at '{path}': {error}. Check the import path."
        ) from error
    return found
