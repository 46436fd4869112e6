"""The critic's update: as the policy's (policy_update.py), with the value loss as objective."""

from __future__ import annotations

from torch import Tensor

from configs.algorithm.algorithm import AlgorithmConfig, CriticConfig
from engines.algorithms.aggregation import Normaliser
from engines.algorithms.metric_sums import MetricSums
from engines.algorithms.objective import Objective
from engines.algorithms.value_loss import value_loss
from engines.train.critic import Critic
from engines.train.micro_batch import MicroBatch
from engines.train.packing import MiniBatch
from engines.train.policy_update import Updater
from engines.train.spec import UpdateResult
from storage.batches.refs import BatchRef

COLUMNS = ("returns", "values")


class CriticUpdater(Updater):
    """One update of a critic; made anew for each. The policy's objective has no part in it."""

    _settings: CriticConfig

    def run(
        self, batch: BatchRef, algorithm: AlgorithmConfig, max_new_tokens: int, step: int
    ) -> UpdateResult:
        """Train on the batch. Raises ValueError where a column is missing or a row too long."""
        self._settings = algorithm.critic
        return super().run(batch, algorithm, max_new_tokens, step)

    def _columns(self, batch: BatchRef, objective: Objective) -> list[str]:
        missing = sorted(set(COLUMNS) - set(batch.names))
        if missing:
            raise ValueError(
                f"The critic's update needs the columns {', '.join(missing)}; the batch has "
                f"{', '.join(batch.names)}. Run the values and advantage tasks first."
            )
        return list(COLUMNS)

    def _select(
        self, batch: BatchRef, mini: MiniBatch, columns: list[str], objective: Objective
    ) -> None:
        """Every token counts."""

    def _loss(
        self,
        micro: MicroBatch,
        objective: Objective,
        normaliser: Normaliser,
        selected: Tensor | None,
    ) -> tuple[Tensor, MetricSums]:
        critic = self._forward.policy
        assert isinstance(critic, Critic)
        (values,) = critic(micro.packed)
        loss, metrics = value_loss(
            values,
            micro.columns["returns"],
            micro.columns["values"],
            micro.mask,
            micro.packed.rows,
            normaliser,
            clip=self._settings.clip,
            aggregation=self._settings.aggregation,
        )
        return loss, MetricSums(means=metrics.means, sums={"loss": metrics.sums["value_loss"]})
