"""Recipes: YAML files of settings in configs/recipes, found by name or path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError, change, read_settings
from configs.recipe_files import FOLDER, recipe_names
from configs.resolving import resolve, this_machine

Run = TypeVar("Run", bound=GRPOConfig)
DEMO = "smollm2-arithmetic"


def find_recipe(recipe: str) -> Path:
    """The file of a recipe given by name or path; ConfigError if there is none of the name."""
    for path in (Path(recipe), FOLDER / f"{recipe}.yaml"):
        if path.is_file():
            return path
    if "/" in recipe or recipe.endswith((".yaml", ".yml")) or Path(recipe).exists():
        return Path(recipe)
    raise ConfigError(
        f"There is no recipe {recipe}. Give the path of a YAML file, or one of: "
        f"{', '.join(recipe_names())}."
    )


def load_recipe(model: type[Run], recipe: str = DEMO, overrides: Sequence[str] = ()) -> Run:
    """The settings of a new run by a recipe: what neither it nor the overrides set is decided."""
    return resolve(read_recipe(model, recipe, overrides), this_machine()).settings


def read_recipe(model: type[Run], recipe: str = DEMO, overrides: Sequence[str] = ()) -> Run:
    """Read a recipe, apply key=value overrides in order, and check the whole.

    Values are read as YAML, so steps=5, train.learning_rate=1e-6 and rollout.stop=[a,b] work.
    Files that the recipe names are looked for beside it first.
    """
    path = find_recipe(recipe)
    raw = read_settings(path)
    return change(model, raw, overrides, path.absolute().parent)
