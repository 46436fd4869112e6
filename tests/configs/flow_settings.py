"""The settings of every flow and command that there is, found by their modules."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from configs.base import Settings
from configs.grpo import GRPOConfig
from configs.recipe_files import FOLDER, flow_of, recipe_names

CONFIGS = Path(__file__).parents[2] / "configs"
OTHER = ("configs.serve:ServeConfig", "configs.teachers:TeacherServiceConfig")


def any_flows_recipes() -> list[str]:
    """Names of the recipes that any flow takes: all but those with teachers."""
    return [name for name in recipe_names() if flow_of(FOLDER / f"{name}.yaml") != "distill"]


def of_flows() -> dict[str, type[GRPOConfig]]:
    """By name, those of flows."""
    for path in CONFIGS.glob("*.py"):
        import_module(f"configs.{path.stem}")
    found, left = {}, [GRPOConfig]
    while left:
        kind = left.pop()
        if kind.__module__.startswith("configs."):
            found[kind.__name__] = kind
        left += kind.__subclasses__()
    return found


def of_commands() -> list[type[Settings]]:
    """Those of flows and of services."""
    found: list[type[Settings]] = [*of_flows().values()]
    for path in OTHER:
        module, _, name = path.partition(":")
        if find_spec(module) is not None:
            found.append(getattr(import_module(module), name))
    return found
