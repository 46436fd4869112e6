"""Where a user's code that scores or plays has changed since a run's last step: told, and marked.

By the digests of files that settings name. Nothing of theirs is imported here. What else a reward
function loads is not looked at; the record of what scored is `reward_code` of each commit.
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from configs.episodes import Environment
from configs.grpo import GRPOConfig
from configs.imports import is_file
from configs.rewards import FunctionReward
from storage.runs.commit_log import Commit
from storage.runs.run_store import RunStore
from storage.tracking.plots import MEANING_CHANGED

FIELD = "code_files"  # of run.json: the digests when the run began
ENVIRONMENT = "environment "


def code_files(config: GRPOConfig) -> dict[str, str]:
    """Reward's label, or `environment NAME` -> sha256 of the file with its function or class.

    Without those whose file is not found, such as functions of compiled modules.
    """
    found = ((label, _file_of(path)) for label, path in _functions(config))
    return {
        label: f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
        for label, file in found
        if file is not None
    }


def _functions(config: GRPOConfig) -> Iterator[tuple[str, str]]:
    suites = [] if config.evaluation is None else config.evaluation.suites.values()
    for rewards in (config.rewards, *(one.rewards for one in suites if one.rewards is not None)):
        for reward in rewards.functions:
            if isinstance(reward, FunctionReward):
                yield reward.label, reward.path
    for one in config.played.values():
        for path in _paths(one.environment):
            yield ENVIRONMENT + path.rpartition(":")[2], path


def _paths(environment: Environment) -> Sequence[str]:
    """The import paths of what an environment is made of."""
    if environment.kind in ("class", "agent"):
        return (environment.path,)
    if environment.kind == "tools":
        return environment.functions
    if environment.kind in ("gymnasium", "openenv") and environment.codec is not None:
        return (environment.codec,)
    return ()


def _file_of(path: str) -> Path | None:
    """The file of an import path, found as Python does but without an import of its packages."""
    place = path.rpartition(":")[0]
    if is_file(place):
        return Path(place) if Path(place).is_file() else None
    parts = place.split(".")
    for folder in map(Path, sys.path):
        module = folder.joinpath(*parts)
        for file in (module / "__init__.py", module.with_suffix(".py")):
            if file.is_file():
                return file
    return None


def changed_code(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Labels whose file was another; what was not there before is new, and no change."""
    return sorted(label for label, digest in now.items() if before.get(label, digest) != digest)


def _recorded(files: RunStore, last: Commit | None) -> Mapping[str, str]:
    """The digests under which the last step was made; of an older Refrain's those of its rewards."""
    if last is None:
        return cast("Mapping[str, str]", files.constant(FIELD) or {})
    if last.code_files:
        return last.code_files
    made = (one for functions in last.reward_code.values() for one in functions)
    return {str(one["name"]): str(one["module"]) for one in made if one.get("module")}


def code_sentence(
    files: RunStore, config: GRPOConfig, last: Commit | None, owner: str | None
) -> str | None:
    """What a person is told once when a run goes on with other code; None where it is the same.

    last: the commit that the run goes on from; None: it has none. owner: the run that made the steps
    so far, of a fork its parent; None: this one is new.
    """
    if owner is None:
        return None
    labels = changed_code(_recorded(files, last), code_files(config))
    if not labels:
        return None
    since = "the run began" if last is None else f"step {last.step}"
    first = "now on" if last is None else f"step {last.step + 1} on, which is marked"
    said = (
        f"The code of {' and '.join(labels)} has changed since {since}: from {first}, scores do not "
        "compare with those before."
    )
    rewards = [label for label in labels if not label.startswith(ENVIRONMENT)]
    if rewards:
        words = ["refrain", "rescore", owner, "--reward", rewards[0], *config.store.words()]
        said += f" The stored samples of earlier steps are scored again by: {shlex.join(words)}."
    return said


def code_metrics(files: RunStore, last: Commit | None, now: Mapping[str, str]) -> dict[str, float]:
    """Metrics that mark a step as the first by other code: meaning_changed/code_of_NAME = 1.

    last: the commit before it. now: as `code_files` gave it when this flow began.
    """
    if last is None:
        return {}
    return {
        f"{MEANING_CHANGED}code_of_{label.replace(' ', '_')}": 1.0
        for label in changed_code(_recorded(files, last), now)
    }
