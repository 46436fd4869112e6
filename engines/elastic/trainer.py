"""Elastic training from the flow's side: a Trainer whose gang is the aggregator alone.

Gradients and log-probs are computed by a pool of independent workers, units of them on lease
(leases.py). How the weights of a version come back after a failure is Trainer's, unchanged: the last
snapshot, and the stored batches since, whose gradients are computed again where they are gone.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import numpy as np

from engines.elastic.contract import GradientAggregator, GradientWorker, Offered, UnitDone
from engines.elastic.leases import Round, Unit, UnitLeases
from engines.train.batching.balancing import contiguous_cuts
from engines.train.trainer import Opening, Trainer, TrainerSettings
from engines.workers.cluster import raise_if_set
from engines.workers.engine import Call, CallId, EngineSpec
from engines.workers.gang import Gang
from engines.workers.pool import EnginePool
from storage.batches.refs import BatchRef
from storage.objects.errors import ObjectMissing
from storage.runs.commit_log import head
from storage.runs.gradients import GradientsRefused, gradients_key, remove_keys
from storage.runs.run_store import RunStore, start_of

if TYPE_CHECKING:
    from engines.train.contract import LogprobRequest, UnitAttempt, UpdateRequest, UpdateResult

logger = logging.getLogger(__name__)

P = ParamSpec("P")  # what a method takes
R = TypeVar("R")  # what it returns

MOST_OFFERS = 5  # of an optimizer step, whose gradients or weights were damaged or taken away


@dataclass(kw_only=True, slots=True)
class UnitCounts:
    """What an update's metrics say of its units."""

    units: int = 0
    computed: int = 0  # others were there already
    taken_over: int = 0  # from slow workers
    repeated: int = 0  # after a lost worker, or refused by the aggregator
    unequal: int = 0  # computed twice, with other bits
    nbytes: int = 0  # of gradients in the store
    sum_seconds: float = 0.0  # in which the aggregator added up and made optimizer steps
    tries: list[UnitAttempt] = field(default_factory=list)  # of units

    def metrics(self) -> dict[str, float]:
        """By name."""
        metrics: dict[str, float] = {
            "units": self.units,
            "computed": self.computed,
            "taken_over": self.taken_over,
            "repeated": self.repeated,
            "unequal": self.unequal,
            "gradient_bytes": self.nbytes,
            "sum_seconds": self.sum_seconds,
        }
        return {f"elastic/{name}": float(value) for name, value in metrics.items()}

    def add(self, units: Sequence[UnitDone], round: Round[UnitDone]) -> None:
        """Count units that were done, in how many tries."""
        self.tries += [
            dataclasses.replace(attempt, unit=attempt.unit + self.units)
            for attempt in list(round.tries)
        ]
        self.units += len(units)
        self.computed += sum(unit.computed for unit in units)
        self.taken_over += round.taken_over
        self.repeated += round.failures.total()
        self.unequal += sum(not unit.equal for unit in units)


class ElasticTrainer(Trainer):
    """Drives an aggregator and its workers."""

    def __init__(
        self,
        gang: Gang[GradientAggregator],
        files: RunStore,
        pool: EnginePool[GradientWorker],
        settings: TrainerSettings,
        *,
        unit_tokens: int,
        lease: float,
    ) -> None:
        """
        Args:
            gang: Of one rank, the aggregator.
            files: Of the run.
            pool: The workers.
            settings: As of Trainer.
            unit_tokens: Of a part of a log-prob pass.
            lease: Seconds after which a unit goes to another worker too.
        """
        super().__init__(gang, files, settings)
        self._aggregator = gang
        self._pool = pool
        self._unit_tokens = unit_tokens
        self._numbers = itertools.count()
        self._leases = UnitLeases(pool.live, self._check, lease)

    def _logprobs(self, version: int, request: LogprobRequest) -> BatchRef:
        """Parts of `unit_tokens` are spread over the workers."""
        edges = self._cuts(request.batch)
        stem, dot, suffix = request.out_key.rpartition(".")
        parts = [
            dataclasses.replace(
                request,
                batch=request.batch.rows(start, stop),
                out_key=f"{stem}-{number}of{len(edges) - 1}{dot}{suffix}",
            )
            for number, (start, stop) in enumerate(pairwise(edges))
        ]
        for _ in range(MOST_OFFERS):
            under = self._under(version + 1)
            weights = self._ask(
                GradientAggregator.offer_weights, version, under=under, version=version
            )
            calls = [
                self._unit(
                    GradientWorker.logprobs_under,
                    f"{request.column}-{number}-{request.out_key}",
                    version,
                    weights=weights,
                    request=part,
                )
                for number, part in enumerate(parts)
            ]
            try:
                results, _ = self._leases.done(calls)
            except ObjectMissing as error:  # the weights, which another flow's commit removed
                logger.warning("Log-probs are computed again: %s", error)
                continue
            return BatchRef.concat([part.batch for part in results if part.batch is not None])
        raise GradientsRefused(_given_up("log-probs", version))

    def _cuts(self, batch: BatchRef) -> list[int]:
        """Edges of parts of contiguous rows, which follow from the rows alone."""
        store = self._files.store
        tokens = batch.lengths(store, "prompt_ids") + batch.lengths(store, "response_ids")
        parts = min(len(batch), max(1, -(-int(tokens.sum()) // self._unit_tokens)))
        edges = contiguous_cuts(tokens.astype(np.float64), parts)
        return sorted(set(edges))

    def _update(self, request: UpdateRequest) -> UpdateResult:
        # Whatever breaks in here, the aggregator is formed anew: no half-applied update stays.
        self._version = None
        counts, step = UnitCounts(), request.step
        steps = self._ask(GradientAggregator.open_update, step, request=request)
        for _ in range(steps):
            self._optimizer_step(request, counts)
        result = self._ask(GradientAggregator.close_update, step)
        self._version = step
        metrics = {**result.metrics, **counts.metrics()} if steps else result.metrics
        return dataclasses.replace(result, metrics=metrics, units=tuple(counts.tries))

    def _optimizer_step(self, request: UpdateRequest, counts: UnitCounts) -> None:
        """Have the gradients of one optimizer step computed, until the aggregator has made it."""
        step = request.step
        for _ in range(MOST_OFFERS):
            under = self._under(step)
            offered = self._ask(GradientAggregator.offer, step, under=under)
            try:
                self._compute(request, offered, counts)
            except (ObjectMissing, GradientsRefused) as error:  # another flow has taken them away
                logger.warning("Gradients are offered again: %s", error)
                continue
            applied = self._ask(GradientAggregator.apply, step)
            counts.sum_seconds += applied.seconds
            if not applied.refused:
                counts.nbytes += applied.nbytes
                if under != step:  # it is committed: nobody else would remove them
                    self._remove(offered, under)
                return
            counts.repeated += len(applied.refused)
            for why in applied.refused.values():
                logger.warning("A gradient is computed again. %s", why)
        raise GradientsRefused(_given_up("gradients", step))

    def _compute(self, request: UpdateRequest, offered: Offered, counts: UnitCounts) -> None:
        """Have every unit's gradient left in the store."""
        # What a worker needs of both, which go to one for each unit.
        offered_alone = dataclasses.replace(offered, units=())
        without_plan = dataclasses.replace(request, plan=None)
        results, went = self._leases.done(
            [
                self._unit(
                    GradientWorker.gradient,
                    f"gradient-{offered.of.optimizer_step}-{unit.number}",
                    request.step,
                    offered=offered_alone,
                    unit=unit,
                    request=without_plan,
                )
                for unit in offered.units
            ]
        )
        counts.add(results, went)

    def _remove(self, offered: Offered, under: int) -> None:
        """Remove gradients that have served, and the weights that were left for them."""
        store, folders = self._files.store, [offered.folder]
        if offered.weights.key.startswith(gradients_key(self._files, under)):
            folders.append(offered.weights.key)
        remove_keys(store, [key for folder in folders for key in store.list(folder)])

    def _under(self, step: int) -> int:
        """The step that is not committed yet, which is a later one where an update is made again."""
        committed = head(self._files) or start_of(self._files)
        return max(step, committed + 1)

    def _ask(
        self,
        method: Callable[Concatenate[GradientAggregator, P], R],
        at: int,
        /,
        *nothing: P.args,
        **arguments: P.kwargs,
    ) -> R:
        """Call the aggregator for step `at`; never answered from its record of an earlier call."""
        call_id = self._call_id(f"{method.__name__}-{next(self._numbers)}", at)
        return self._aggregator.call(method, call_id, self._settings.cancel, *nothing, **arguments)

    def _unit(
        self,
        method: Callable[Concatenate[GradientWorker, P], R],
        name: str,
        at: int,
        /,
        *nothing: P.args,
        **arguments: P.kwargs,
    ) -> Unit[R]:
        """A call for step `at`, on any worker; its engine is built where it has none."""

        def work(worker: str, address: str) -> R:
            self._pool.ready(worker, address)
            call_id = CallId(
                run=self._caller,
                epoch=self._settings.epoch,
                step=at,
                call=f"{name}@{next(self._numbers)}",
            )
            call = Call.of(self._pool.role, method, call_id, *nothing, **arguments)
            return self._pool.submit(address, call)

        return work

    def _check(self) -> None:
        raise_if_set(self._settings.cancel)
        self._pool.cluster.check()


def _given_up(what: str, step: int) -> str:
    return (
        f"The {what} of step {step} were damaged or removed {MOST_OFFERS} times while they were "
        "computed. Look at the store, and at whether another flow writes to this run, which can be "
        "resumed."
    )


def elastic_trainer(opening: Opening) -> ElasticTrainer:
    """On the pools of a cluster; nothing is built yet."""
    config, spec, roles = opening.config, opening.spec, opening.config.cluster.roles
    aggregator = EngineSpec.of("engines.elastic.aggregator:Aggregator", spec, GradientAggregator)
    worker = EngineSpec.of("engines.elastic.worker:GradientEngine", spec, GradientWorker)
    return ElasticTrainer(
        opening.gang(aggregator, roles.pool_of("aggregator"), world=1),
        opening.files,
        EnginePool(
            opening.cluster,
            roles.actor,
            f"{opening.name}-gradients",
            worker,
            deadline=config.train_of(spec.role).deadline,
            start_timeout=config.cluster.start_timeout,
            cancel=opening.settings.cancel,
        ),
        opening.settings,
        unit_tokens=config.train.unit_tokens,
        lease=config.train.unit_lease,
    )
