"""The gang of a critic, brought to any version by replay as a policy's is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engines.critic.contract import CriticEngine
from engines.train.opening import gang_of
from engines.train.trainer import Trainer, TrainerSettings, columns_of
from engines.workers.cluster import Cluster
from engines.workers.engine import EngineSpec
from engines.workers.gang import Gang
from storage.batches.refs import BatchRef
from storage.runs.run_store import RunStore

if TYPE_CHECKING:
    from configs.grpo import GRPOConfig
    from engines.train.spec import TrainSpec


class CriticTrainer(Trainer):
    """A trainer that is asked for values."""

    def __init__(
        self, gang: Gang[CriticEngine], files: RunStore, settings: TrainerSettings
    ) -> None:
        super().__init__(gang, files, settings)
        self._critics = gang

    def values(self, version: int, batch: BatchRef, out_key: str) -> BatchRef:
        """A critic's values of the responses [N, jagged] under a version, as a new column."""
        with self._lock:
            self.at(version)
            return columns_of(
                self._critics.call(
                    CriticEngine.values,
                    self._call_id(f"values-{out_key}", version),
                    self._settings.cancel,
                    batch=batch,
                    out_key=out_key,
                )
            )


def critic_trainer(
    cluster: Cluster,
    config: GRPOConfig,
    files: RunStore,
    spec: TrainSpec,
    name: str,
    settings: TrainerSettings,
) -> CriticTrainer:
    """Ranks that hold the critic together."""
    engine = EngineSpec.of("engines.critic.engine:CriticRank", spec, CriticEngine)
    return CriticTrainer(gang_of(cluster, config, spec, name, engine), files, settings)
