"""Whether an engine holds the weights that it was given: its log-probs against the trainer's."""

from __future__ import annotations

from dataclasses import dataclass

from engines.rollout.contract import SyncReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A few sequences with the trainer's log-probs under the version to be loaded."""

    tokens: list[list[int]]  # prompt and response of each sequence
    prompt_lengths: list[int]
    logprobs: list[list[float]]  # of the response tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """One engine's checked load of a policy version."""

    report: SyncReport
    logprob_error: float  # mean absolute difference from the trainer on the probe, nats per token
