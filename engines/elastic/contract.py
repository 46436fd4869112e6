"""What the flow process asks of an aggregator of gradients and of those that compute them.

Kept by engines/elastic/aggregator.py and engines/elastic/worker.py. Free of torch.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from engines.train.contract import TrainEngine
from engines.workers.engine import Engine

if TYPE_CHECKING:
    from engines.elastic.spec import Applied, Offered, Unit, UnitDone
    from engines.train.spec import ColumnsResult, LogprobRequest, UpdateRequest, UpdateResult
    from storage.runs.weights import WeightsRef


class GradientAggregator(TrainEngine):
    """Has weights and optimizer, and adds gradients up that others have computed."""

    @abstractmethod
    def offer_weights(self, under: int, version: int) -> WeightsRef:
        """What is held, in the number format of products, for workers to compute with.

        The policy version itself, where it is published so; else it is left with the gradients of
        step `under`, for as long as they are there. Products are the same as with the weights held,
        for these are cast first here too.
        """

    @abstractmethod
    def open_update(self, request: UpdateRequest) -> int:
        """Begin the update of a step; returns the number of its optimizer steps."""

    @abstractmethod
    def offer(self, under: int) -> Offered:
        """Say which gradients the next optimizer step takes.

        under: the step that is not committed yet, with which they are left. May be asked again.
        """

    @abstractmethod
    def apply(self) -> Applied:
        """Add the gradients up and make the optimizer step that was offered.

        Where one is missing, damaged, or of something else, it is named and discarded, and nothing
        is changed: it has to be computed again.
        """

    @abstractmethod
    def close_update(self) -> UpdateResult:
        """End the update once its optimizer steps are made; the weights are then the step's."""


class GradientWorker(Engine):
    """Computes gradients and log-probs with weights from the store."""

    @abstractmethod
    def gradient(self, offered: Offered, unit: Unit, request: UpdateRequest) -> UnitDone:
        """Leave the sum of a unit's gradients in the store, unless it is there.

        offered: Its `units` are left out on the way here, and the request's `plan`.

        Raises GradientsRefused where it is not wanted, ObjectMissing where the weights are gone.
        """

    @abstractmethod
    def logprobs_under(self, weights: WeightsRef, request: LogprobRequest) -> ColumnsResult:
        """Write log-probs of response tokens under given weights; of rows in their order."""
