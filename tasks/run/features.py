"""What a feature adds to a run beside tasks of its own, as one record; see docs/extending.md.

The settings say which features a run uses (`features` of configs/run.py). Of the others nothing is
imported: the table has their records by path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from configs.cluster.cluster import Role
from configs.grpo import GRPOConfig
from configs.model import Model
from configs.rewards import RewardsConfig
from configs.rollout import RolloutConfig
from tasks.memory.holders import HoldersOf
from tasks.run.findings import Finding

if TYPE_CHECKING:  # what a refused setting does not wait for
    from engines.data.contract import ScoreRequest
    from engines.data.results import ModelScores
    from engines.workers.cluster import Cluster
    from storage.batches.refs import BatchRef
    from storage.objects.store import Store
    from storage.runs.run_store import RunStore
    from tasks.results import Metrics, Sampled
    from tasks.run.roles.role import ByRole, EngineRole
    from tasks.run.run_view import Caller
    from tasks.run.stage_view import StageView

# By name, where each feature's record is.
FEATURES: Mapping[str, str] = {
    "elastic": "tasks.elastic.feature:FEATURE",
    "teachers": "tasks.teachers.feature:FEATURE",
    "progress": "tasks.progress_rewards.feature:FEATURE",
    "trees": "tasks.trees.feature:FEATURE",
    "critic": "tasks.critic.feature:FEATURE",
    "reward_models": "tasks.reward_models.feature:FEATURE",
}


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
    # The samples of a shard that is not to be sampled; None: sample it.
    complete: Callable[[StageView, PromptShard], Sampled | None] = lambda run, shard: None
    # The scores that its models give samples, which go to the reward functions; None: it has none.
    scores: Callable[[StageView, ScoredFirst], ModelScores | None] = lambda run, asked: None
    # The clients of engines that a suite with rewards of its own, of this name, has for itself.
    of_suite: Callable[[Caller, Cluster, str], Mapping[EngineRole[Any], object]] = _no_engines
    metrics: Callable[[ByRole], Metrics] = lambda engines: {}  # of its engines since the last look


def features_of(config: GRPOConfig) -> list[Feature]:
    """The records of the features that a run of these settings uses, in the table's order."""
    return [_record(path) for name, path in FEATURES.items() if name in config.features]


def tidy(config: GRPOConfig, files: RunStore, head: int) -> list[str]:
    """Remove what the features' steps up to `head`, which is committed, have left; the keys."""
    return [key for feature in features_of(config) for key in feature.tidy(files, head)]


def _record(path: str) -> Feature:
    module, _, name = path.partition(":")
    found = getattr(import_module(module), name)
    assert isinstance(found, Feature), path
    return found
