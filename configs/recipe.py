"""Recipes: YAML files of settings in configs/recipes, found by name or path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import yaml

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError, change
from configs.resolving import resolve, this_machine
from configs.yaml_text import KeyTwice, read_yaml

Run = TypeVar("Run", bound=GRPOConfig)
FOLDER = Path(__file__).parent / "recipes"
DEMO = "smollm2-arithmetic"


def recipe_names() -> list[str]:
    """Names of the recipes that come with Refrain."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_recipe(recipe: str) -> Path:
    """The file of a recipe given by name or path; ConfigError if there is none."""
    for path in (Path(recipe), FOLDER / f"{recipe}.yaml"):
        if path.is_file():
            return path
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
    try:
        raw = read_yaml(path.read_text())
    except KeyTwice as error:
        raise ConfigError(f"{path}: {error}. Remove one.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {_why_no_yaml(error)}.") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no settings: its top level must be key: value lines.")
    return change(model, raw, overrides, path.absolute().parent)


def _why_no_yaml(error: yaml.YAMLError) -> str:
    """What is wrong, and in which line where that is known."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error).splitlines()[0]
    place = f"in line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    if "'\\t'" in (error.problem or ""):
        return f"{place} is a tab. Indent with spaces"
    return f"{error.problem or error.context}, {place}"
