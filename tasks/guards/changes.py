"""What a rollback changes in a run's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError, change

# Settings that a run keeps when it goes back to an earlier step.
FIXED = ("continue_from", "guards", "lora", "max_rollbacks", "model", "name", "store")


def check_rollbacks(config: GRPOConfig) -> None:
    """Whether the settings to which guards would change a run can be those of a fork; ConfigError."""
    for guard in config.guards:
        if guard.action != "rollback":
            continue
        named, given = f"guards: rollback.change of {guard.label}", guard.rollback.change
        if fixed := sorted(key for key in given if key.partition(".")[0] in FIXED):
            raise ConfigError(
                f"{named} has {fixed[0]}, which a run that goes back keeps. Remove it; a new run can "
                "have another."
            )
        plain = config.model_dump(mode="json")
        try:
            change(type(config), plain, settings_after(plain, given))
        except ValueError as error:
            raise ConfigError(f"{named}: {error}") from error


def settings_after(settings: Mapping[str, Any], change: Mapping[str, Any]) -> list[str]:
    """What a rollback changes in a run's plain settings, as words key=value; ValueError if it cannot.

    A factor is applied to the value that is there: x0.1 of a learning rate of 1e-6 gives 1e-7.
    """
    return [f"{key}={_worded(settings, key, value)}" for key, value in change.items()]


def _worded(settings: Mapping[str, Any], key: str, value: Any) -> str:
    factor = _factor(value)
    if factor is None:
        return "null" if value is None else str(value)
    place: Any = settings
    for part in key.split("."):
        if isinstance(place, list) and part.isdigit() and int(part) < len(place):
            place = place[int(part)]
        else:
            place = place.get(part) if isinstance(place, Mapping) else None
    if isinstance(place, bool) or not isinstance(place, int | float):
        raise ValueError(
            f"guards: rollback.change has {key}: {value}, and {key} = {place} is no number to "
            "multiply. Give a value."
        )
    return f"{round(place * factor)}" if isinstance(place, int) else f"{place * factor:.12g}"


def _factor(value: Any) -> float | None:
    """0.1 of x0.1; None of what is no factor."""
    if not isinstance(value, str) or not value.startswith("x"):
        return None
    try:
        return float(value[1:])
    except ValueError:
        return None
