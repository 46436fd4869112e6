"""What the tasks that sample and score know of those that have it done: a run, or an evaluation."""

from __future__ import annotations

from typing import Protocol

from configs.grpo import GRPOConfig
from engines.data.contract import EnvironmentHost, RewardModels, Scorer
from engines.rollout.rollout_pool import RolloutPool
from engines.workers.messages import CallId
from engines.workers.pool import EnginePool
from storage.objects.store import Store
from storage.runs.stage_store import StageStore
from storage.runs.weights import WeightsRef
from tasks.reporting.run_view import AttemptsView
from tasks.run.shard_driver import AtOnce


class StageEngines(Protocol):
    """Engines that sample, answer and score; see tasks.run.engines.Engines."""

    @property
    def rollouts(self) -> RolloutPool:
        """Those that sample."""

    @property
    def opponents(self) -> RolloutPool:
        """Those of the frozen version that plays against the policy."""

    @property
    def scorers(self) -> EnginePool[Scorer]:
        """The workers that score."""

    @property
    def environments(self) -> EnginePool[EnvironmentHost]:
        """The workers that have the environments of episodes."""

    @property
    def reward_models(self) -> EnginePool[RewardModels]:
        """The workers that hold reward models."""


class StageView(AttemptsView, Protocol):
    """Settings, engines and the place of results."""

    config: GRPOConfig
    store: Store
    episodes: AtOnce

    @property
    def files(self) -> StageStore:
        """Where results of stages lie."""

    @property
    def engines(self) -> StageEngines:
        """Whose calls they are."""

    def usable_weights(self, step: int) -> list[WeightsRef]:
        """Policy versions with which samples of a step may have been drawn, the current one first."""

    def call_id(self, step: int, call: str) -> CallId:
        """A call of a step."""
