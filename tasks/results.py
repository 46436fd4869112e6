"""What tasks hand to each other: refs, counts and metrics, never tensors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from engines.rewards.runner import LoggedMetric, RewardCode
from engines.rollout.contract import ShardStats
from engines.train.contract import MadeOn
from storage.batches.refs import BatchRef
from storage.prompts.cursor import Cursor
from storage.runs.commit_log import CarriedGroup, Commit
from storage.runs.weights import WeightsRef

Metrics = dict[str, float]  # by name, as MLflow shows them: reward/mean, time/rollout, …


@dataclass(frozen=True, kw_only=True)
class Carried:
    """Groups that a step hands on to the next one (rollout.partial_rollout)."""

    prompts: BatchRef | None = None  # a row for each group, in the order of `groups`
    begun: BatchRef | None = None  # the samples of the groups that are begun, in that order
    groups: tuple[CarriedGroup, ...] = ()

    @classmethod
    def of(cls, commit: Commit) -> Carried:
        """What a committed step hands on."""
        refs = commit.refs
        return cls(
            prompts=refs.get("carried"), begun=refs.get("begun"), groups=tuple(commit.carried)
        )

    def __len__(self) -> int:
        return len(self.groups)

    def begun_of(self, number: int) -> BatchRef | None:
        """The samples of a group, counted from 0; None where there are none yet."""
        if self.begun is None or not self.groups[number].begun:
            return None
        return self.begun.rows(self._begun_before[number], self._begun_before[number + 1])

    @functools.cached_property
    def _begun_before(self) -> list[int]:
        """How many samples of begun groups are before each group, and last, how many of all."""
        samples = [group.samples if group.begun else 0 for group in self.groups]
        unknown = samples.count(None)  # then all have as many
        each = len(self.begun or ()) // unknown if unknown else 0
        return list(
            itertools.accumulate(
                (each if sample is None else sample for sample in samples), initial=0
            )
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """The prompts of one step: those carried to it first, then those that it drew."""

    ref: BatchRef  # prompt_ids, group_id, prompt_row, row
    cursor: Cursor  # where the next step draws
    drawn: int  # rows drawn from the dataset
    dropped: dict[str, list[int]]  # rows left out, by reason
    carried: Carried = field(default_factory=Carried)
    shards_before: int = 0  # of the step, in earlier rounds (tasks/dynamic_sampling.py)
    metrics: Metrics = field(default_factory=dict)  # of how they were drawn
    passed_over: int = 0  # rows in quarantine that the draw passed over
    readmissions: int = 0  # requests to readmit rows that it took account of, of the run so far

    @property
    def new(self) -> BatchRef:
        """Those that the step drew."""
        return self.ref.rows(len(self.carried), len(self.ref))


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOver:
    """The groups of a step that it did not wait for (rollout.over_sampling)."""

    carried: Carried = field(default_factory=Carried)
    dropped: dict[str, int] = field(default_factory=dict)  # groups, by reason
    samples: BatchRef | None = None  # of the dropped groups, as far as they came


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One shard of completions; with unfinished ones where the step did not wait for it."""

    prompts: BatchRef
    weights: WeightsRef  # policy version that sampled
    ref: BatchRef  # the samples, those of a prompt together, in the order of the prompts
    stats: ShardStats
    key: str = ""  # under which the shard was finished
    nodes: BatchRef | None = None  # the segments of which trees of samples consist, each once
    frames: BatchRef | None = None  # what episodes saw: a row for each turn, sample_id, turn, frame


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsampled:
    """One shard that the step did not wait for, and that no engine has taken."""

    begun: BatchRef | None  # samples to go on with, where there are some from earlier


# What a task run returns of the shards that it drove, in their order.
SampledShards = tuple[Sampled | Unsampled, ...]
WholeShards = tuple[Sampled, ...]


def samples_of_shards(sampled: Iterable[WholeShards]) -> BatchRef:
    """The samples of all shards, in order."""
    refs = [shard.ref for shards in sampled for shard in shards]
    return refs[0] if len(refs) == 1 else BatchRef.concat(refs)


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureCause:
    """What kept some samples from a reward."""

    function: str
    error: str  # of one line
    samples: int  # that it befell


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Some shards, sampled and scored."""

    sampled: WholeShards
    ref: BatchRef  # the samples with reward, score/<function>, extra/<function>/<column>, status
    failures: int  # samples whose scoring failed
    code: tuple[RewardCode, ...]  # the functions that scored
    seconds: float  # time in the reward functions
    metrics: dict[str, LoggedMetric]  # what they gave to log_metric, by its name
    # Of the step's successful episodes, by which progress was measured; the same in all its shards.
    clusters: BatchRef | None = None
    causes: tuple[FailureCause, ...] = ()  # of the failures


def nodes_of(scored: Iterable[Scored]) -> BatchRef | None:
    """The segments of all shards, in order; None where no trees were sampled."""
    refs = [shard.nodes for part in scored for shard in part.sampled if shard.nodes is not None]
    return BatchRef.concat(refs) if refs else None


def frames_of(shards: Iterable[Sampled]) -> BatchRef | None:
    """The frames of all shards, in order; None where none are kept."""
    refs = [shard.frames for shard in shards if shard.frames is not None]
    return BatchRef.concat(refs) if refs else None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """The samples that the update sees."""

    ref: BatchRef  # the kept samples with advantages, and log-probs once they are added
    trained: int  # prompts whose group is kept
    filtered_by: dict[str, int]  # prompts left out by the algorithm's selection, by rule
    dropped: dict[str, int]  # prompts left out for a failure, or not wanted, by reason
    metrics: Metrics
    baselines: BatchRef | None = None  # scored greedy completions, where the method wants them
    taught: BatchRef | None = None  # the teachers' columns of all samples, where there are teachers

    @property
    def filtered(self) -> int:
        """Prompts left out by the algorithm's selection."""
        return sum(self.filtered_by.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Updated:
    """What is trained, after the update; the tensors are in the train workers."""

    version: int
    metrics: Metrics
    made_on: MadeOn | None = None  # None: of an attempt that an older Refrain made


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
