"""What tasks and features know of those that have it done: a run, or an evaluation."""

from __future__ import annotations

from typing import Protocol

from configs.grpo import GRPOConfig
from engines.workers.messages import CallId
from storage.objects.store import Store
from storage.runs.run_store import StageStore
from storage.runs.weights import WeightsRef
from tasks.run.clock import Clock
from tasks.run.episode_driver import EpisodeDriver
from tasks.run.roles.role import ByRole
from tasks.run.run_view import AttemptsView
from tasks.run.shard_driver import ShardDriver


class StageView(AttemptsView, Protocol):
    """Settings, engines and the place of results."""

    config: GRPOConfig
    store: Store
    episodes: EpisodeDriver

    @property
    def files(self) -> StageStore:
        """Where results of stages lie."""

    @property
    def engines(self) -> ByRole:
        """Whose calls they are."""

    def usable_weights(self, step: int) -> list[WeightsRef]:
        """Policy versions with which samples of a step may have been drawn, the current one first."""

    def call_id(self, step: int, call: str) -> CallId:
        """A call of a step."""


class StepView(StageView, Protocol):
    """A run, for those of its features that have a part in its steps."""

    clock: Clock
    shards: ShardDriver
