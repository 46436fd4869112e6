"""What the flow process asks of an aggregator of gradients and of those that compute them.

Kept by engines/elastic/aggregator.py and engines/elastic/worker.py. Free of torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.train.contract import TrainEngine
from engines.workers.engine import Engine
from storage.runs.gradients import GradientsOf
from storage.runs.weights import WeightsRef

if TYPE_CHECKING:
    from engines.train.contract import ColumnsResult, LogprobRequest, UpdateRequest, UpdateResult
    from storage.runs.weights import WeightsRef


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Rows whose tokens' gradients one worker sums."""

    number: int  # within the optimizer step; gradients are added up in this order
    rows: tuple[int, ...]  # row numbers of the batch, ascending


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCounts:
    """By what the loss of a mini-batch is divided: counts over all its units."""

    tokens: float  # with mask 1
    sequences: float  # rows with at least one such token
    rows: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Offered:
    """An optimizer step whose gradients are wanted."""

    of: GradientsOf
    folder: str  # key, where they are left
    weights: WeightsRef  # with which they are computed
    counts: LossCounts
    units: tuple[Unit, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitDone:
    """A unit whose gradient is in the store."""

    unit: int
    nbytes: int  # of its file
    computed: bool  # False: it was there already
    equal: bool = True  # False: another worker's first gradient stands, and has other bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """What became of an optimizer step: it was made, unless gradients were refused."""

    refused: Mapping[int, str]  # by unit, why; their markers are gone
    nbytes: int = 0  # of gradients that were read
    seconds: float = 0.0


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
