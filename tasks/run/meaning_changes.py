"""Where the meaning of a scorer changed since a run's last step: what is said, how it is marked."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import cast

from configs.grpo import GRPOConfig
from configs.storage import StoreConfig
from engines.meanings import (
    GREEDY,
    LOGPROBS,
    VERSIONS,
    MeaningChange,
    changes,
    meanings_of,
)
from engines.models.facts import model_facts
from storage.runs.commit_log import Commit
from storage.runs.run_store import RunStore
from storage.tracking.plots import MEANING_CHANGED

FIELD = "meanings"  # of run.json: the versions in force when the run began


def meaning_sentence(
    files: RunStore, config: GRPOConfig, last: Commit | None, owner: str | None
) -> str | None:
    """What a person is told when a run goes on under other meanings; None where nothing changed.

    last: the commit that the run goes on from; None: it has none, and began with what run.json says.
    owner: the run that made the steps so far, of a fork its parent; None: this one is new.
    """
    if owner is None:
        return None
    before = _began_with(files) if last is None else last.meanings
    found = changes(before, meanings_of(config.model_dump(mode="json")))
    head = changes(before, _of_model(before, config))
    if not found and not head:
        return None
    since = "since the run began" if last is None else f"since step {last.step}"
    first, mark = ("now", "") if last is None else (f"step {last.step + 1}", ", which is marked")
    said = []
    if found:
        said.append(
            f"What {' and '.join(map(str, found))} means has changed {since}: from {first} on{mark}, "
            f"scores do not compare with those before. {_remedy(found, config, owner)}"
        )
    if head:
        said.append(
            f"What {head[0]} are has changed {since}: those that the trainer made left the scale, "
            f"cap or bias of this model's output head out. From {first} on{mark}, they are the "
            "model's own; losses, ratios and KL do not compare with those before, and earlier "
            "updates are replayed otherwise."
        )
    return " ".join(said)


def _of_model(before: Mapping[str, int], config: GRPOConfig) -> dict[str, int]:
    """What of the model itself has had two meanings; empty once the newer one is in force."""
    if before.get(LOGPROBS, 1) == VERSIONS[LOGPROBS]:
        return {}
    facts = model_facts(config.model)
    return {} if facts is None or facts.plain_head else {LOGPROBS: VERSIONS[LOGPROBS]}


def _began_with(files: RunStore) -> Mapping[str, int]:
    """The meanings that run.json has; an older Refrain's has none."""
    return cast("Mapping[str, int]", files.constant(FIELD) or {})


def _remedy(found: Sequence[MeaningChange], config: GRPOConfig, owner: str) -> str:
    """How what was scored before is scored anew."""
    kinds = {one.name for one in found}
    labels = [reward.label for reward in config.rewards.functions if reward.kind in kinds]
    rescore = _command(config.store, "rescore", owner, "--reward", *(labels[:1] or ["NAME"]))
    said = f"The stored samples of earlier steps are scored again by: {rescore}."
    if GREEDY in kinds or config.evaluation is not None:
        again = _command(config.store, "evaluate", owner, "--suite", "NAME", "--versions", "all")
        said += f" Evaluations are made again by: {again}."
    return said


def _command(store: StoreConfig, *words: str) -> str:
    return shlex.join(["refrain", *words, *store.words()])


def meaning_metrics(last: Commit | None, config: GRPOConfig) -> dict[str, float]:
    """Metrics that mark a step as the first under other meanings: meaning_changed/math = 2.

    last: the commit before it.
    """
    if last is None:
        return {}
    now = {
        **meanings_of(config.model_dump(mode="json")),
        **_of_model(last.meanings, config),
    }
    return {
        f"{MEANING_CHANGED}{one.name.replace(' ', '_')}": float(one.now)
        for one in changes(last.meanings, now)
    }


def marked(metrics: Mapping[str, float]) -> str:
    """What changed with a step, for its page: math 2; empty where nothing did."""
    return ", ".join(
        f"{name.removeprefix(MEANING_CHANGED)} {value:.0f}"
        for name, value in sorted(metrics.items())
        if name.startswith(MEANING_CHANGED)
    )
