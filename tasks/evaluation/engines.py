"""The engines of a suite: those of the steps where it asks and scores as they do, or its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from configs.cluster import Role
from engines.rollout.rollout_pool import RolloutPool
from engines.workers.cluster import Cluster
from engines.workers.engine import E, EngineSpec
from engines.workers.pool import EnginePool
from tasks.run.features import features_of
from tasks.run.roles.environments import ENVIRONMENT, environment_engine
from tasks.run.roles.role import ByRole, Clients, EngineRole, pool_of
from tasks.run.roles.sampling import OPPONENT, ROLLOUT
from tasks.run.roles.scoring import SCORER, scoring_engine
from tasks.run.run_view import Caller
from tasks.run.suite import Suite


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPlace:
    """Where evaluations are made."""

    cluster: Cluster
    rollouts: RolloutPool
    opponents: RolloutPool | None = None
    aside: bool = False  # on a pool that does nothing else
    shared: ByRole | None = None  # of the steps, for suites that ask and score as they do

    def engines_of(self, caller: Caller, suite: Suite) -> ByRole:
        """A suite's engines; building them is left to their first call."""
        if suite.settings.as_run and self.shared is not None:
            return self.shared
        asks = _Asks(caller, suite)
        config, name = suite.config, f"evaluation-{suite.name}"

        def pool(role: Role, what: str, engine: EngineSpec[E], deadline: float) -> EnginePool[E]:
            there: Role = "evaluation" if self.aside else role
            return pool_of(asks, self.cluster, there, f"{name}{what}", engine, deadline)

        clients: dict[EngineRole[Any], object] = {
            ROLLOUT: self.rollouts,
            SCORER: pool("reward", "", scoring_engine(asks), config.scoring_deadline),
        }
        if self.opponents is not None:
            clients[OPPONENT] = self.opponents
        if config.episodes is not None:
            played = environment_engine(asks, config.episodes)
            clients[ENVIRONMENT] = pool(
                "environment", "-environment", played, config.rollout.deadline
            )
        for feature in features_of(config):
            clients |= feature.of_suite(asks, self.cluster, name)
        return Clients(clients)


class _Asks:
    """A caller with the suite's settings in place of its own."""

    def __init__(self, caller: Caller, suite: Suite) -> None:
        self.config = suite.config
        self.name, self.store, self.files = caller.name, caller.store, caller.files
        self.epoch, self.cancelled = caller.epoch, caller.cancelled
        self.attempts, self.tell = caller.attempts, caller.tell
        self.device_time = caller.device_time
