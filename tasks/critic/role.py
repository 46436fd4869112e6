"""The critic's engines: ranks that are trained beside the policy's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.grpo import GRPOConfig
from engines.critic.trainer import CriticTrainer, critic_trainer
from engines.workers.cluster import Cluster
from storage.runs.run_store import RunStore
from tasks.run.contract import EngineRole, StartingEngines
from tasks.run.roles import bring_to_head, trainer_by

if TYPE_CHECKING:
    from tasks.run.contract import RunView


def _trainer(run: RunView, cluster: Cluster, files: RunStore, config: GRPOConfig) -> CriticTrainer:
    return trainer_by(critic_trainer, run, cluster, "critic", files, config)


def _start(engines: StartingEngines, trainer: CriticTrainer) -> None:
    def critic(files: RunStore, config: GRPOConfig) -> CriticTrainer:
        return _trainer(engines.run, engines.cluster, files, config)

    bring_to_head(engines, "critic", trainer, critic)


CRITIC: EngineRole[CriticTrainer] = EngineRole(
    name="critic",
    client=lambda run, cluster: _trainer(run, cluster, run.files, run.config),
    start=_start,
)
