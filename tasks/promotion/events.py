"""What is told of a policy version that was judged."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.run.events import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyJudged(Event):
    """A policy version became the one that has an alias in the registry, or did not."""

    version: int
    promoted: bool
    reason: str
    alias: str
    model: str  # name in the registry
    number: str  # the version's in the registry
    reward: float  # mean over the prompts of the suite that decides
    error: float  # standard error of that mean
    samples: int
    failed: int
    truncated: int
