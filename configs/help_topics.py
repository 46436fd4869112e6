"""What `--help` says of settings: first those that people change, then a group, one, or all."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from pydantic import BaseModel

from configs.overrides import ConfigError
from configs.settings_help import fields, like

WIDTH = 92  # characters of a line
ALL = "all"

# By group, in the order in which a first run is set up.
COMMON = (
    *("model.path", "lora.rank"),
    *("data.source", "data.prompt_column", "data.system_prompt", "data.max_prompt_tokens"),
    *("data.epochs", "rewards.functions"),
    *("steps", "prompts_per_step", "group_size", "max_staleness", "seed", "name"),
    *("rollout.engine", "rollout.max_new_tokens", "rollout.temperature", "rollout.max_sequences"),
    *("train.learning_rate", "train.micro_batch_tokens", "train.mini_batches", "train.recompute"),
    *("algorithm.advantage", "algorithm.loss", "algorithm.kl.coefficient"),
    *("cluster.pools.NAME.workers", "cluster.pools.NAME.gpus", "cluster.share_devices"),
    *("evaluation.suites", "guards"),
    *("store.uri", "store.snapshot_every", "store.keep_versions", "tracking.uri"),
)


def common_settings(model: type[BaseModel], program: str) -> str:
    """The settings that people change, and how the others are asked for."""
    settings = {name: (kind, default, meaning) for name, kind, default, meaning in fields(model)}
    shown = [(name, *settings[name]) for name in COMMON if name in settings]
    groups = "\n".join(
        textwrap.wrap(
            ", ".join(group for group in model.model_fields if _inside(settings, group)),
            WIDTH,
            initial_indent="  ",
            subsequent_indent="  ",
        )
    )
    return "\n".join(
        [
            f"settings that are often changed, of {len(settings)} (name, type, default):",
            *_lines(shown),
            "",
            f"{program} --help GROUP says what a group has:",
            groups,
            f"{program} --help SETTING says what one is, and {program} --help all what all are.",
            "refrain recipe NAME writes a recipe with a comment on each setting.",
        ]
    )


def help_on(model: type[BaseModel], topic: str) -> str:
    """What a setting is, what a group has, or all; ConfigError if there is none of this name."""
    parts = topic.split(".")
    lines = [line for line in fields(model) if topic == ALL or _is_in(parts, line[0])]
    if lines:
        return "\n".join(_lines(lines))
    near = like(model, topic) or next(iter(get_close_matches(topic, model.model_fields)), None)
    hint = f"Did you mean {near}?" if near else f"There are: {', '.join(model.model_fields)}."
    raise ConfigError(f"{topic} is no setting, and no group of settings. {hint}")


def _is_in(topic: Sequence[str], name: str) -> bool:
    """Whether a setting is the one that is asked for, or in that group.

    Names of pools, suites and the like are the user's, and numbers count from 0.
    """
    parts = name.partition(" ")[0].split(".")
    return len(parts) >= len(topic) and all(
        theirs == ours or ours == "NAME" or (ours == "0" and theirs.isdigit())
        for theirs, ours in zip(topic, parts, strict=False)
    )


def _lines(settings: Iterable[tuple[str, str, str, str]]) -> Iterable[str]:
    for name, kind, default, meaning in settings:
        head = "  ".join(part for part in (name, kind, f"[{default}]" if default else "") if part)
        yield f"  {head}"
        yield from textwrap.wrap(
            meaning, WIDTH, initial_indent="      ", subsequent_indent="      "
        )


def _inside(names: Mapping[str, object], group: str) -> bool:
    return any(name.startswith(f"{group}.") for name in names)
