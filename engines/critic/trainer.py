"""The gang of a critic, brought to any version by replay as a policy's is."""

from __future__ import annotations

from engines.critic.contract import CriticEngine
from engines.train.trainer import Opening, Trainer, TrainerSettings, columns_of
from engines.workers.engine import EngineSpec
from engines.workers.gang import Gang
from storage.batches.refs import BatchRef
from storage.runs.run_store import RunStore


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


def critic_trainer(opening: Opening) -> CriticTrainer:
    """Ranks that hold the critic together."""
    engine = EngineSpec.of("engines.critic.engine:CriticRank", opening.spec, CriticEngine)
    return CriticTrainer(opening.gang(engine), opening.files, opening.settings)
