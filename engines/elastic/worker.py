"""A worker of elastic training: it holds the whole model and computes what it is asked for, alone.

It has no optimizer, and what it holds it takes from the store: who asks says with which weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.algorithms.aggregation import Normaliser
from engines.elastic.contract import GradientWorker, LossCounts, Offered, Unit, UnitDone
from engines.elastic.gradients import unit_metrics, write_gradient
from engines.train.batching.packing import plan_update, read_lengths
from engines.train.contract import ColumnsResult, LogprobRequest, TrainSpec, UpdateRequest
from engines.train.fsdp_engine import DTYPES, FSDPEngine
from engines.train.model.fsdp import own_part
from engines.train.optimizer import Optimizer
from engines.train.policy import HeadedModel
from engines.train.updater import made_on
from storage.batches.refs import BatchRef
from storage.objects.documents import key_of
from storage.runs.gradients import read_gradient
from storage.runs.weights import WeightsRef

JOIN_TIMEOUT = 60.0  # seconds for a meeting of one


class GradientEngine(FSDPEngine, GradientWorker):
    """One rank that is a gang of its own; see the module's docstring."""

    def __init__(self, spec: TrainSpec) -> None:
        super().__init__(spec)
        self._weights = ""  # digest of those that it has taken from the store; none so far
        self.join(rank=0, world=1, host="127.0.0.1", port=0, generation=1, timeout=JOIN_TIMEOUT)

    def _new_optimizer(self, policy: HeadedModel) -> Optimizer | None:
        return None

    def gradient(self, offered: Offered, unit: Unit, request: UpdateRequest) -> UnitDone:
        standing = read_gradient(self._files, offered.folder, unit.number)
        if standing is not None and standing.of == offered.of:
            return UnitDone(unit=unit.number, nbytes=standing.nbytes, computed=False)
        self._hold(offered.weights)
        parameters = {n: p for n, p in self._loaded().named_parameters() if p.requires_grad}
        updater = self._updater(request)
        try:
            tally, finite = updater.gradient(
                request.batch,
                self._micro_batches(request.batch, unit.rows),
                normaliser_of(offered.counts, request.max_new_tokens),
            )
            gradients = {
                n: own_part(p.grad)[0] for n, p in parameters.items() if p.grad is not None
            }
            standing, equal = write_gradient(
                self._files,
                offered.folder,
                offered.of,
                unit.number,
                key_of(list(unit.rows)),
                gradients,
                DTYPES[self._spec.train.gradient_dtype],
                made_on(self._spec.train, self._device),
                unit_metrics(tally, finite),
            )
        finally:
            for parameter in parameters.values():
                parameter.grad = None
        return UnitDone(unit=unit.number, nbytes=standing.nbytes, computed=True, equal=equal)

    def logprobs_under(self, weights: WeightsRef, request: LogprobRequest) -> ColumnsResult:
        self._hold(weights)
        return self.logprobs(request)

    def _hold(self, weights: WeightsRef) -> None:
        """Take weights from the store unless they are held."""
        if weights.digest == self._weights:
            return
        self._weights = ""
        self.load_weights(weights, weights.version)
        self._weights = weights.digest

    def _micro_batches(self, batch: BatchRef, rows: Sequence[int]) -> list[list[int]]:
        """A unit's rows, in parts that the device takes at once."""
        config = self._spec.train
        lengths = read_lengths(self._store, batch.take(rows), config.tree_training)
        (mini,) = plan_update(
            lengths,
            world=1,
            budget=config.micro_batch_tokens,
            cost=self._cost,
            lone_rank=self._spec.lone_rank_plans,
        )
        return [[rows[place] for place in micro] for micro in mini.ranks[0]]


def normaliser_of(counts: LossCounts, max_new_tokens: int) -> Normaliser:
    """By what losses of a mini-batch are divided, where gradients are added up over units."""
    return Normaliser(
        tokens=counts.tokens,
        sequences=counts.sequences,
        rows=counts.rows,
        max_tokens=float(max_new_tokens),
    )
