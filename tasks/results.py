"""What tasks hand to each other: refs, counts and metrics, never tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from engines.rewards.failing_samples import LoggedMetric
from engines.rewards.runner import RewardCode
from engines.rollout.contract import ShardStats
from storage.batches.refs import BatchRef
from storage.prompts.cursor import Cursor
from storage.runs.weights import WeightsRef

Metrics = dict[str, float]  # by name, as MLflow shows them: reward/mean, time/rollout, …


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """The prompts of one step."""

    ref: BatchRef  # prompt_ids, group_id, prompt_row, row
    cursor: Cursor  # where the next step draws
    drawn: int  # rows drawn from the dataset
    dropped: dict[str, list[int]]  # rows left out, by reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One shard of completions."""

    prompts: BatchRef
    weights: WeightsRef  # policy version that sampled
    ref: BatchRef  # the samples; row i belongs to row i // group_size of the prompts
    stats: ShardStats


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """One shard, sampled and scored."""

    sampled: Sampled
    ref: BatchRef  # the samples with reward, score/<function>, extra/<function>/<column>, status
    failures: int  # samples whose scoring failed
    code: tuple[RewardCode, ...]  # the functions that scored
    seconds: float  # time in the reward functions
    metrics: dict[str, LoggedMetric]  # what they gave to log_metric, by its name


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """The samples that the update sees."""

    ref: BatchRef  # the kept samples with advantages, and log-probs once they are added
    trained: int  # prompts whose group is kept
    filtered: int  # prompts left out by the algorithm's filter
    dropped: dict[str, int]  # prompts left out for a failure, by reason
    metrics: Metrics
    baselines: BatchRef | None = None  # scored greedy completions, where the method wants them


@dataclass(frozen=True, kw_only=True, slots=True)
class Updated:
    """The policy, or the critic, after the update; the tensors are in the train workers."""

    version: int
    metrics: Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Synced:
    """A policy version that is published, loaded by the rollout engines, and checked."""

    weights: WeightsRef
    workers: list[str]  # rollout workers that hold it
    metrics: Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSummary:
    """A committed step."""

    step: int
    version: int
    seconds: float
    metrics: Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """A finished run and where its things are."""

    run: str
    steps: int  # committed
    asked: int  # more than that where the data's epochs were over first
    checkpoint: str  # URL of the last policy version
    dashboard: str  # URL of the flow run
    tracking: str  # URL or command that shows the MLflow run
    plot: str  # path or URL of the curves
    metrics: Metrics = field(default_factory=dict)
