"""The version of its meaning that each built-in scorer has, greedy evaluation and log-probs.

A version is raised when the same answer may be worth something else than before. Runs keep those in
force in run.json and in each commit; what has none, as an older Refrain's, is of version 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from configs.rewards import Reward, RewardsConfig

GREEDY = "greedy evaluation"
LOGPROBS = "log-probs"  # of models whose output head is more than a product
# Raise one with the change; what changed is in CHANGELOG.md.
VERSIONS = {
    "reasoning_gym": 1,
    # 2: references in LaTeX are read whole, and the last box counts; 3: degrees beside parts of pi,
    # lists of words, 0 for an answer that takes too long
    "math": 3,
    "choice": 3,  # 2: letters in LaTeX and small ones; 3: more ways to say it, in more languages
    "environment": 1,
    # 2: all forms of tests run, and a row without any fails its samples; 3: doctest, calls in pairs,
    # named tuples, annotations as they are, texts and attributes of the program's objects
    "unit_tests": 3,
    LOGPROBS: 2,  # 2: by the head as the model has it: its scale, cap and bias had been left out
    GREEDY: 2,  # 2: of tokens that are equally likely the lowest, and no draw
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeaningChange:
    """What a scorer's meaning was, and is."""

    name: str  # kind of the reward, GREEDY or LOGPROBS
    before: int
    now: int

    def __str__(self) -> str:
        return f"{self.name} (version {self.before}, now {self.now})"


def meaning_of(reward: Reward) -> int:
    """The version of a reward's meaning; 1 of those that are not ours."""
    return VERSIONS.get(reward.kind, 1)


def meanings_of(settings: Mapping[str, Any]) -> dict[str, int]:
    """The versions in force of all that scores a run's samples and evaluations.

    settings: of the run, as plain values; those of an older Refrain will do.
    """
    suites = ((settings.get("evaluation") or {}).get("suites") or {}).values()
    scored = [settings["rewards"], *(one["rewards"] for one in suites if one.get("rewards"))]
    kinds = {reward["kind"] for rewards in scored for reward in rewards["functions"]}
    if any(one.get("greedy") for one in suites):
        kinds.add(GREEDY)
    return {kind: VERSIONS[kind] for kind in sorted(kinds & VERSIONS.keys())}


def suite_meanings(rewards: RewardsConfig, greedy: bool) -> dict[str, int]:
    """Those of one suite that are not the first: what its evaluations have to have in common."""
    kinds = {reward.kind for reward in rewards.functions} | ({GREEDY} if greedy else set())
    return {kind: VERSIONS[kind] for kind in sorted(kinds) if VERSIONS.get(kind, 1) > 1}


def changes(before: Mapping[str, int], now: Mapping[str, int]) -> list[MeaningChange]:
    """Those of `now` that had another version before; what has none had the first."""
    return [
        MeaningChange(name=name, before=before.get(name, 1), now=version)
        for name, version in now.items()
        if before.get(name, 1) != version
    ]
