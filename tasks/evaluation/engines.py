"""The engines of a suite: those of the steps where it asks and scores as they do, or its own."""

from __future__ import annotations

from dataclasses import dataclass

from configs.cluster.cluster import Role
from engines.data.contract import EnvironmentHost, PromptMaker, RewardModels, Scorer
from engines.rollout.rollout_pool import RolloutPool
from engines.workers.cluster import Cluster
from engines.workers.engine import E, EngineSpec
from engines.workers.pool import EnginePool
from tasks.reporting.run_view import Caller
from tasks.run.handles import environment_engine, pool_of, reward_model_engine, scoring_engine
from tasks.run.suite import Suite


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteEngines:
    """Engines as the tasks that sample and score know them (tasks/run/stage_view.py)."""

    rollouts: RolloutPool
    scorers: EnginePool[Scorer]
    opponents_or_none: RolloutPool | None = None
    environments_or_none: EnginePool[EnvironmentHost] | None = None
    reward_models_or_none: EnginePool[RewardModels] | None = None

    @property
    def opponents(self) -> RolloutPool:
        """Those of the frozen version that plays against the policy."""
        assert self.opponents_or_none is not None, "the suite has no opponent"
        return self.opponents_or_none

    @property
    def environments(self) -> EnginePool[EnvironmentHost]:
        """The workers that have the environments of episodes."""
        assert self.environments_or_none is not None, "the suite plays no episodes"
        return self.environments_or_none

    @property
    def reward_models(self) -> EnginePool[RewardModels]:
        """The workers that hold reward models."""
        assert self.reward_models_or_none is not None, "the suite has no reward model"
        return self.reward_models_or_none

    @property
    def prompters(self) -> EnginePool[PromptMaker]:
        """The workers that make prompts of rows."""
        return self.scorers if self.environments_or_none is None else self.environments


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where evaluations are made."""

    cluster: Cluster
    rollouts: RolloutPool
    opponents: RolloutPool | None = None
    aside: bool = False  # on a pool that does nothing else
    shared: SuiteEngines | None = None  # of the steps, for suites that ask and score as they do

    def engines_of(self, caller: Caller, suite: Suite) -> SuiteEngines:
        """A suite's engines; building them is left to their first call."""
        if suite.settings.as_run and self.shared is not None:
            return self.shared
        asks = _Asks(caller, suite)
        config, name = suite.config, f"evaluation-{suite.name}"

        def pool(role: Role, what: str, engine: EngineSpec[E], deadline: float) -> EnginePool[E]:
            there: Role = "evaluation" if self.aside else role
            return pool_of(asks, self.cluster, there, f"{name}{what}", engine, deadline)

        scorers = scoring_engine(asks)
        models = environments = None
        if config.episodes is not None:
            played = environment_engine(asks, config.episodes)
            environments = pool("environment", "-environment", played, config.rollout.deadline)
        if config.rewards.on_engines:
            models = pool_of(
                asks,
                self.cluster,
                "reward_model",
                f"{name}-models",
                reward_model_engine(asks),
                config.model_scoring_deadline,
            )
        return SuiteEngines(
            rollouts=self.rollouts,
            scorers=pool("reward", "", scorers, config.scoring_deadline),
            opponents_or_none=self.opponents,
            environments_or_none=environments,
            reward_models_or_none=models,
        )


class _Asks:
    """A caller with the suite's settings in place of its own."""

    def __init__(self, caller: Caller, suite: Suite) -> None:
        self.config = suite.config
        self.name, self.store, self.files = caller.name, caller.store, caller.files
        self.epoch, self.cancelled = caller.epoch, caller.cancelled
        self.attempts, self.progress = caller.attempts, caller.progress
        self.terminal, self.device_time = caller.terminal, caller.device_time
