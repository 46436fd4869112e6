"""What a feature adds to a run beside tasks of its own, as one record; see docs/extending.md.

The settings say which features a run uses (`features` of configs/run.py). Of the others nothing is
imported: the table has their records by path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from configs.cluster import Role
from configs.grpo import GRPOConfig
from configs.model import Model
from configs.overrides import ConfigError
from configs.rewards import RewardsConfig
from configs.rollout import RolloutConfig
from tasks.memory.holders import HoldersOf, Place

if TYPE_CHECKING:  # what a refused setting does not wait for
    from prefect.futures import PrefectFuture

    from engines.data.contract import ModelScores, ScoreRequest
    from engines.workers.cluster import Cluster
    from storage.batches.refs import BatchRef
    from storage.evaluations.results import EvaluationResult
    from storage.objects.store import Store
    from storage.prompts.cursor import Cursor
    from storage.runs.commit_log import Commit, GuardRecord, Outline
    from storage.runs.run_store import RunStore
    from tasks.results import Carried, Metrics, Prompts, Sampled, SampledShards, WholeShards
    from tasks.run.clock import KnownRows, RowTracker
    from tasks.run.contract import (
        ByRole,
        Caller,
        EngineRole,
        FeatureView,
        RunView,
        StageView,
        StepView,
    )
    from tasks.run.events import Reports
    from tasks.run.facts import OpenedRun, Position, RunFacts
    from tasks.run.shard_driver import ShardRange

    StartRollout = Callable[[ShardRange], PrefectFuture[SampledShards]]
    Groups = Sequence[PrefectFuture[WholeShards] | WholeShards]

# By name, where each feature's record is.
FEATURES: Mapping[str, str] = {
    "elastic": "tasks.elastic.feature:FEATURE",
    "teachers": "tasks.teachers.feature:FEATURE",
    "progress": "tasks.progress_rewards.feature:FEATURE",
    "trees": "tasks.trees.feature:FEATURE",
    "critic": "tasks.critic.feature:FEATURE",
    "over_sampling": "tasks.over_sampling.feature:FEATURE",
    "tasks": "tasks.several_tasks.feature:FEATURE",
    "coding": "tasks.coding.feature:FEATURE",
    "quarantine": "tasks.quarantine.feature:FEATURE",
    "guards": "tasks.guards.feature:FEATURE",
    "promotion": "tasks.promotion.feature:FEATURE",
    "reward_models": "tasks.reward_models.feature:FEATURE",
}
# Those that a run uses also where its last commit leaves them something to do, whatever the settings
# say by now: a fork has others, and a person may have taken guards out.
LEFT_BY_COMMIT: Mapping[str, Callable[[Position], bool]] = {
    "over_sampling": lambda position: bool(position.carried),
    "guards": lambda position: position.last is not None and bool(position.last.guards),
}
# Hooks that one feature of a run answers at most.
SINGLE = ("rows", "draw", "next_rows", "rollout", "complete", "scores")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnVllm:
    """A vLLM that only this feature has; packages and devices are checked for it before the start."""

    role: Role
    name: str  # for people, such as teacher NAME
    setting: str  # where its settings are; its `kind` may be fsdp instead
    settings: RolloutConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptShard:
    """Prompts of a step that are to be completed."""

    step: int
    number: int  # counted from 1
    prompts: BatchRef  # [prompts]
    n: int  # completions of each


@dataclass(frozen=True, kw_only=True, slots=True)
class ToDraw:
    """What a step is made of."""

    count: int  # groups that it draws
    carried: Carried | None = None  # groups that it goes on with; None: none


class NextRows(Protocol):
    """The rows of so many prompts of a step, where they are not the next ones in the order."""

    def draw(self, cursor: Cursor, known: KnownRows) -> tuple[list[int], Cursor]:
        """The row numbers that are still wanted, and the cursor after them."""

    def dropped(self, rows: Sequence[int]) -> None:
        """Some of them made no prompts: others are wanted in their place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToCommit:
    """What a commit has of a feature."""

    refs: Mapping[str, BatchRef] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdicts:
    """On a step that is about to be committed; they stand in its commit."""

    records: list[GuardRecord] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)  # that follow from them


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredFirst:
    """Samples that are to be scored, before reward functions are called."""

    step: int
    number: int  # of the call among those of the stage
    key: str  # digest of what is scored, and by what
    request: ScoreRequest


def _no_engines(caller: Caller, cluster: Cluster, name: str) -> Mapping[EngineRole[Any], object]:
    return {}


def _no_models(config: GRPOConfig) -> Mapping[str, Model]:
    return {}


def _as_they_are(store: Store, config: GRPOConfig) -> GRPOConfig:
    return config


@dataclass(frozen=True, kw_only=True)
class Feature:
    """What is left out adds nothing."""

    roles: tuple[EngineRole[Any], ...] = ()
    vllms: Callable[[GRPOConfig], Iterable[OwnVllm]] = lambda config: ()
    # Before anything starts, in milliseconds, what no rule can ask; ValueError, one sentence.
    check_settings: Callable[[GRPOConfig], None] = lambda config: None
    # Before anything starts, of what is outside the settings; ValueError, one sentence, for a fault.
    check: Callable[[GRPOConfig], Iterable[Finding]] = lambda config: ()
    # Models that the train engine runs beside the policy, by their setting: the self-test has them.
    models: Callable[[GRPOConfig], Mapping[str, Model]] = _no_models
    # Of the rewards of a run, or of a suite, before their functions are loaded; ValueError too.
    check_rewards: Callable[[RewardsConfig], object] = lambda rewards: None
    holders: HoldersOf = lambda config, shape: ()  # of memory
    # The settings of a new run, with what they mean now, such as a version for an alias.
    pin: Callable[[Store, GRPOConfig], GRPOConfig] = _as_they_are
    begin: Callable[[RunStore, GRPOConfig], object] = lambda files, config: None  # it is on record
    # Removes what steps up to the last committed one have left of it; the keys.
    tidy: Callable[[RunStore, int], list[str]] = lambda files, head: []
    # What draws go by, of a run that begins or goes on.
    rows: Callable[[OpenedRun, Position], RowTracker | None] = lambda opened, position: None
    # Of a step that begins; None: it draws prompts_per_step groups and goes on with none. Where
    # rollout.partial_rollout = carry, `rollout` says when the next step may draw (Clock.leave).
    draw: Callable[[StepView, int], ToDraw | None] = lambda run, step: None
    # Of a step that draws so many prompts from a place on; None: the next rows in the order.
    next_rows: Callable[[RunView, int, Cursor, int], NextRows | None] = (
        lambda run, step, cursor, count: None
    )
    # Of a step whose prompts are there: the groups to train on, of rollout tasks that it starts by
    # the function that it is given, in their order; None: every group of every shard.
    rollout: Callable[[StepView, int, Prompts, StartRollout], Groups | None] = (
        lambda run, step, prompts, start: None
    )
    # The samples of a shard that is not to be sampled; None: sample it.
    complete: Callable[[StageView, PromptShard], Sampled | None] = lambda run, shard: None
    # Of a step that is committed next, with its prompts and its scored samples.
    commit: Callable[[StepView, int, Prompts, BatchRef], ToCommit] = (
        lambda run, step, prompts, samples: ToCommit()
    )
    # The scores that its models give samples, which go to the reward functions; None: it has none.
    scores: Callable[[StageView, ScoredFirst], ModelScores | None] = lambda run, asked: None
    # The clients of engines that a suite with rewards of its own, of this name, has for itself.
    of_suite: Callable[[Caller, Cluster, str], Mapping[EngineRole[Any], object]] = _no_engines
    metrics: Callable[[ByRole], Metrics] = lambda engines: {}  # of its engines since the last look
    # Before a step with these metrics is committed; None: it judges no steps.
    judge: Callable[[FeatureView, int, Metrics], Verdicts] | None = None
    # After a commit, before steps that wait for it begin.
    committed: Callable[[FeatureView, Outline], None] = lambda run, commit: None
    # Before the first step of a run that goes on: what its last commit says that is still to be done.
    take_up: Callable[[FeatureView], None] = lambda run: None
    # After the last step, before the run's end is on record, with what the suites say of the last
    # version; None: it is not evaluated.
    after_steps: Callable[[FeatureView, Mapping[str, EvaluationResult] | None], object] = (
        lambda run, results: None
    )
    # Who shows what it tells; heard after the others.
    listen: Callable[[RunFacts, Reports], None] = lambda facts, reports: None
    page: Callable[[Commit], list[str]] = lambda commit: []  # Markdown lines of a step's note


def features_of(config: GRPOConfig, position: Position | None = None) -> list[Feature]:
    """The records of the features that a run of these settings uses, in the table's order.

    position: where it begins or goes on; None: nothing is left by a commit. Raises LookupError where
    the settings name a feature of which there is no record.
    """
    used = set(config.features)
    if unknown := sorted(used - FEATURES.keys()):
        raise LookupError(
            f"The settings use {', '.join(unknown)}, and there is no such feature: it is not among "
            f"those of tasks/run/features.py ({', '.join(FEATURES)})."
        )
    if position is not None:
        used |= {name for name, is_left in LEFT_BY_COMMIT.items() if is_left(position)}
    features = [_record(path) for name, path in FEATURES.items() if name in used]
    for hook in SINGLE:
        nothing = Feature.__dataclass_fields__[hook].default
        answers = [feature for feature in features if getattr(feature, hook) is not nothing]
        assert len(answers) < 2, f"two features of a run have the hook {hook}"
    return features


def judged(features: Iterable[Feature], run: FeatureView, step: int, metrics: Metrics) -> Verdicts:
    """What the features say of a step that is about to be committed."""
    verdicts = [feature.judge(run, step, metrics) for feature in features if feature.judge]
    return Verdicts(
        records=[record for verdict in verdicts for record in verdict.records],
        metrics={name: value for verdict in verdicts for name, value in verdict.metrics.items()},
    )


def tidy(config: GRPOConfig, files: RunStore, head: int) -> list[str]:
    """Remove what the features' steps up to `head`, which is committed, have left; the keys."""
    return [key for feature in features_of(config) for key in feature.tidy(files, head)]


def _record(path: str) -> Feature:
    module, _, name = path.partition(":")
    feature = getattr(import_module(module), name)
    assert isinstance(feature, Feature), path
    return feature


class PreflightError(ConfigError):
    """The run cannot start; the message says what, which value, and what to set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one check looked at and found good."""

    check: str  # one word
    found: str  # for people
    place: Place | None = None  # of a memory plan, which `found` sums up
    warning: bool = False  # nothing that stops the run, and still to be read before it
