"""Where the meaning of a scorer, or a user's code, changed since a run's last step: told, and marked.

A user's code by the digests of files that settings name. Nothing of theirs is imported here. What
else a reward function loads is not looked at; the record of what scored is `reward_code` of each
commit.
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
from configs.storage import StoreConfig
from engines.meanings import GREEDY, LOGPROBS, VERSIONS, MeaningChange, changes, meanings_of
from engines.models.facts import model_facts
from storage.runs.commit_log import Commit
from storage.runs.run_store import RunStore
from storage.tracking.plots import MEANING_CHANGED

MEANINGS = "meanings"  # of run.json: the versions in force when the run began


def meaning_sentence(
    files: RunStore, config: GRPOConfig, last: Commit | None, owner: str
) -> str | None:
    """What a person is told when a run goes on under other meanings; None where nothing changed.

    last: the commit that the run goes on from; None: it has none, and began with what run.json says.
    owner: the run that made the steps so far, of a fork its parent.
    """
    before = _began_with(files) if last is None else last.meanings
    scorers = changes(before, meanings_of(config.model_dump(mode="json")))
    head = changes(before, _of_model(before, config))
    if not scorers and not head:
        return None
    since = "since the run began" if last is None else f"since step {last.step}"
    first, mark = ("now", "") if last is None else (f"step {last.step + 1}", ", which is marked")
    sentences = []
    if scorers:
        sentences.append(
            f"What {' and '.join(map(str, scorers))} means has changed {since}: from {first} on"
            f"{mark}, scores do not compare with those before. {_remedy(scorers, config, owner)}"
        )
    if head:
        sentences.append(
            f"What {head[0]} are has changed {since}: those that the trainer made left the scale, "
            f"cap or bias of this model's output head out. From {first} on{mark}, they are the "
            "model's own; losses, ratios and KL do not compare with those before, and earlier "
            "updates are replayed otherwise."
        )
    return " ".join(sentences)


def _of_model(before: Mapping[str, int], config: GRPOConfig) -> dict[str, int]:
    """What of the model itself has had two meanings; empty once the newer one is in force."""
    if before.get(LOGPROBS, 1) == VERSIONS[LOGPROBS]:
        return {}
    facts = model_facts(config.model)
    return {} if facts is None or facts.plain_head else {LOGPROBS: VERSIONS[LOGPROBS]}


def _began_with(files: RunStore) -> Mapping[str, int]:
    """The meanings that run.json has; an older Refrain's has none."""
    return cast("Mapping[str, int]", files.constant(MEANINGS) or {})


def _remedy(scorers: Sequence[MeaningChange], config: GRPOConfig, owner: str) -> str:
    """How what was scored before is scored anew."""
    kinds = {change.name for change in scorers}
    labels = [reward.label for reward in config.rewards.functions if reward.kind in kinds]
    rescore = _command(config.store, "rescore", owner, "--reward", *(labels[:1] or ["NAME"]))
    sentence = f"The stored samples of earlier steps are scored again by: {rescore}."
    if GREEDY in kinds or config.evaluation is not None:
        again = _command(config.store, "evaluate", owner, "--suite", "NAME", "--versions", "all")
        sentence += f" Evaluations are made again by: {again}."
    return sentence


def _command(store: StoreConfig, *words: str) -> str:
    return shlex.join(["refrain", *words, *store.words()])


def meaning_metrics(last: Commit, config: GRPOConfig) -> dict[str, float]:
    """Metrics that mark a step as the first under other meanings: meaning_changed/math = 2.

    last: the commit before it.
    """
    now = {
        **meanings_of(config.model_dump(mode="json")),
        **_of_model(last.meanings, config),
    }
    return {
        f"{MEANING_CHANGED}{change.name.replace(' ', '_')}": float(change.now)
        for change in changes(last.meanings, now)
    }


def marked(metrics: Mapping[str, float]) -> str:
    """What changed with a step, for its page: math 2; empty where nothing did."""
    return ", ".join(
        f"{name.removeprefix(MEANING_CHANGED)} {value:.0f}"
        for name, value in sorted(metrics.items())
        if name.startswith(MEANING_CHANGED)
    )


CODE_FILES = "code_files"  # of run.json: the digests when the run began
ENVIRONMENT = "environment "


def code_files(config: GRPOConfig) -> dict[str, str]:
    """Reward's label, or `environment NAME` -> sha256 of the file with its function or class.

    Without those whose file is not found, such as functions of compiled modules.
    """
    files = ((label, _file_of(path)) for label, path in _functions(config))
    return {
        label: f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
        for label, file in files
        if file is not None
    }


def _functions(config: GRPOConfig) -> Iterator[tuple[str, str]]:
    for rewards in config.all_rewards:
        for reward in rewards.functions:
            if isinstance(reward, FunctionReward):
                yield reward.label, reward.path
    for episodes in config.played.values():
        for path in _paths(episodes.environment):
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
        return cast("Mapping[str, str]", files.constant(CODE_FILES) or {})
    if last.code_files:
        return last.code_files
    records = (function for functions in last.reward_code.values() for function in functions)
    return {
        str(function["name"]): str(function["module"])
        for function in records
        if function.get("module")
    }


def code_sentence(
    files: RunStore, config: GRPOConfig, last: Commit | None, owner: str
) -> str | None:
    """What a person is told once when a run goes on with other code; None where it is the same.

    last: the commit that the run goes on from; None: it has none. owner: the run that made the steps
    so far, of a fork its parent.
    """
    labels = changed_code(_recorded(files, last), code_files(config))
    if not labels:
        return None
    since = "the run began" if last is None else f"step {last.step}"
    first = "now on" if last is None else f"step {last.step + 1} on, which is marked"
    sentence = (
        f"The code of {' and '.join(labels)} has changed since {since}: from {first}, scores do not "
        "compare with those before."
    )
    rewards = [label for label in labels if not label.startswith(ENVIRONMENT)]
    if rewards:
        words = ["refrain", "rescore", owner, "--reward", rewards[0], *config.store.words()]
        sentence += (
            f" The stored samples of earlier steps are scored again by: {shlex.join(words)}."
        )
    return sentence


def code_metrics(files: RunStore, last: Commit, now: Mapping[str, str]) -> dict[str, float]:
    """Metrics that mark a step as the first by other code: meaning_changed/code_of_NAME = 1.

    last: the commit before it. now: as `code_files` gave it when this flow began.
    """
    return {
        f"{MEANING_CHANGED}code_of_{label.replace(' ', '_')}": 1.0
        for label in changed_code(_recorded(files, last), now)
    }
