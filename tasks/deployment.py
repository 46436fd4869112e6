"""What a deployment is made of: the build steps that infra/prefect.yaml names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs import recipes
from configs.flows import SETTINGS

CHECKOUT = Path(__file__).parents[1]  # the folder with flows/ and infra/


def recipe(name: str, settings: dict[str, Any] | None = None, flow: str = "grpo") -> dict[str, Any]:
    """A recipe for a flow, checked and complete, as `config`; `settings` are changes by dotted name.

    Complete, so that the form shows every value of the run, and a later change of a default needs
    a new `make deploy` to take effect.
    """
    words = [f"{key}={value}" for key, value in (settings or {}).items()]
    config = recipes.load(SETTINGS[flow], name, words)
    return {"config": config.model_dump(mode="json"), "directory": str(CHECKOUT)}
