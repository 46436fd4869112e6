"""What the data engine's calls return, and their errors; made on a worker, read in the flow process.

Free of torch, as all that the flow process imports. Each result names its columns by a ref.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engines.rewards.failing_samples import LoggedMetric
from engines.rewards.runner import RewardCode
from storage.batches.refs import BatchRef


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsResult:
    """Rows that became prompts."""

    ref: BatchRef | None  # prompt_ids, group_id, prompt_row, row; None when all were dropped
    dropped: tuple[tuple[int, str], ...]  # (row number, reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFailure:
    """A sample whose scoring failed."""

    sample: int  # sample_id
    function: str
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreResult:
    """A scored shard."""

    ref: BatchRef  # reward, score/<function>, extra/<function>/<column>, status, reward_code
    failures: tuple[SampleFailure, ...]
    tracebacks: dict[str, str]  # of the functions' exceptions, by the failures' error
    failed: int  # samples
    metrics: dict[str, LoggedMetric]  # what the functions gave to log_metric, by its name
    code: tuple[RewardCode, ...]  # what the functions were
    seconds: float  # in the reward functions


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantagesResult:
    """The samples of a step that train."""

    ref: BatchRef  # the kept samples with advantages
    trained: int  # groups of which a sample is kept
    filtered: int  # groups left out by the algorithm's selection
    dropped: dict[str, int]  # groups left out for a failure, by reason
    metrics: dict[str, float] = field(default_factory=dict)


class NothingToTrain(RuntimeError):
    """No sample of a step is left for the update."""


class RewardsFailed(RuntimeError):
    """Scoring failed for some sample, and rewards.on_failure = abort."""
