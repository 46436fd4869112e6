"""Elastic training from the flow's side: a Trainer whose gang is the aggregator alone.

Gradients and log-probs are computed by a pool of independent workers, units of them on lease
(leases.py). How the weights of a version come back after a failure is Trainer's, unchanged: the last
snapshot, and the stored batches since, whose gradients are computed again where they are gone.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.algorithm.algorithm import AlgorithmConfig
from engines.elastic.leases import Leases, Round
from engines.elastic.spec import Applied, Offered, UnitDone
from engines.train.batching.balancing import contiguous_cuts
from engines.train.trainer import Trainer
from engines.workers.cluster import raise_if_set
from engines.workers.gang import Gang
from engines.workers.messages import CallId
from engines.workers.pool import EnginePool
from storage.batches.refs import BatchRef
from storage.objects.errors import ObjectMissing
from storage.runs.commit_log import head
from storage.runs.gradients import GradientsRefused, gradients_key, remove_keys
from storage.runs.origins import start_of
from storage.runs.run_store import RunStore

if TYPE_CHECKING:
    from engines.train.spec import UnitAttempt, UpdateResult

logger = logging.getLogger(__name__)

MOST_OFFERS = 5  # of an optimizer step, whose gradients or weights were damaged or taken away


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A call on any worker."""

    name: str  # of the call
    method: str
    step: int  # RL step, for the call's id
    arguments: Mapping[str, Any]


@dataclass(kw_only=True, slots=True)
class Told:
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
        told: dict[str, float] = {
            "units": self.units,
            "computed": self.computed,
            "taken_over": self.taken_over,
            "repeated": self.repeated,
            "unequal": self.unequal,
            "gradient_bytes": self.nbytes,
            "sum_seconds": self.sum_seconds,
        }
        return {f"elastic/{name}": float(value) for name, value in told.items()}

    def add(self, done: Sequence[UnitDone], went: Round[UnitDone]) -> None:
        """Count units that were done, in how many tries."""
        self.tries += [
            dataclasses.replace(one, unit=one.unit + self.units) for one in list(went.tries)
        ]
        self.units += len(done)
        self.computed += sum(one.computed for one in done)
        self.taken_over += went.taken_over
        self.repeated += went.failures.total()
        self.unequal += sum(not one.equal for one in done)


class ElasticTrainer(Trainer):
    """Drives an aggregator and its workers."""

    def __init__(
        self,
        gang: Gang,
        files: RunStore,
        pool: EnginePool,
        *,
        unit_tokens: int,
        lease: float,
        **settings: Any,
    ) -> None:
        """
        Args:
            gang: Of one rank, the aggregator.
            files: Of the run.
            pool: The workers.
            unit_tokens: Of a part of a log-prob pass.
            lease: Seconds after which a unit goes to another worker too.
            settings: As of Trainer.
        """
        super().__init__(gang, files, **settings)
        self._pool = pool
        self._unit_tokens = unit_tokens
        self._numbers = itertools.count()
        self._leases: Leases[Asked, Any] = Leases(self._work, pool.live, self._check, lease)

    def logprobs(
        self, version: int, batch: BatchRef, column: str, out_key: str, squared: bool = False
    ) -> BatchRef:
        """As of Trainer; parts of `unit_tokens` are spread over the workers."""
        with self._lock:
            self.at(version)
            for _ in range(MOST_OFFERS):
                where = {"under": self._under(version + 1), "version": version}
                arguments = {
                    "weights": self._ask("offer_weights", version, where),
                    "column": column,
                    "temperature": self._temperature,
                    "squared": squared,
                }
                edges = self._cuts(batch)
                stem, dot, suffix = out_key.rpartition(".")
                parts = [
                    Asked(
                        name=f"{column}-{number}-{out_key}",
                        method="logprobs_under",
                        step=version,
                        arguments={
                            **arguments,
                            "batch": batch.rows(start, stop),
                            "out_key": f"{stem}-{number}of{len(edges) - 1}{dot}{suffix}",
                        },
                    )
                    for number, (start, stop) in enumerate(pairwise(edges))
                ]
                try:
                    done, _ = self._leases.done(parts)
                except ObjectMissing as error:  # the weights, which another flow's commit removed
                    logger.warning("Log-probs are computed again: %s", error)
                    continue
                return BatchRef.concat([one.batch for one in done])
            raise GradientsRefused(_given_up("log-probs", version))

    def _cuts(self, batch: BatchRef) -> list[int]:
        """Edges of parts of contiguous rows, which follow from the rows alone."""
        store = self._files.store
        tokens = batch.lengths(store, "prompt_ids") + batch.lengths(store, "response_ids")
        parts = min(len(batch), max(1, -(-int(tokens.sum()) // self._unit_tokens)))
        edges = contiguous_cuts(tokens.astype(np.float64), parts)
        return sorted(set(edges))

    def _update(
        self,
        step: int,
        batch: BatchRef,
        algorithm: AlgorithmConfig,
        plan: BatchRef | None = None,
    ) -> UpdateResult:
        # Whatever breaks in here, the aggregator is formed anew: no half-applied update stays.
        self._version = None
        given = {
            "batch": batch,
            "algorithm": algorithm,
            "temperature": self._temperature,
            "max_new_tokens": self._max_new_tokens,
        }
        told = Told()
        steps = self._ask("open_update", step, {**given, "step": step, "plan": plan})
        for _ in range(steps):
            self._optimizer_step(step, given, told)
        result: UpdateResult = self._ask("close_update", step, {})
        self._version = step
        metrics = {**result.metrics, **told.metrics()} if steps else result.metrics
        return dataclasses.replace(result, metrics=metrics, units=tuple(told.tries))

    def _optimizer_step(self, step: int, given: Mapping[str, Any], told: Told) -> None:
        """Have the gradients of one optimizer step computed, until the aggregator has made it."""
        for _ in range(MOST_OFFERS):
            under = self._under(step)
            offered: Offered = self._ask("offer", step, {"under": under})
            try:
                self._compute(step, offered, given, told)
            except (ObjectMissing, GradientsRefused) as error:  # another flow has taken them away
                logger.warning("Gradients are offered again: %s", error)
                continue
            applied: Applied = self._ask("apply", step, {})
            told.sum_seconds += applied.seconds
            if not applied.refused:
                told.nbytes += applied.nbytes
                if under != step:  # it is committed: nobody else would remove them
                    self._remove(offered, under)
                return
            told.repeated += len(applied.refused)
            for why in applied.refused.values():
                logger.warning("A gradient is computed again. %s", why)
        raise GradientsRefused(_given_up("gradients", step))

    def _compute(self, step: int, offered: Offered, given: Mapping[str, Any], told: Told) -> None:
        """Have every unit's gradient left in the store."""
        without = dataclasses.replace(offered, units=())
        done: list[UnitDone]
        done, went = self._leases.done(
            [
                Asked(
                    name=f"gradient-{offered.of.optimizer_step}-{unit.number}",
                    method="gradient",
                    step=step,
                    arguments={**given, "offered": without, "unit": unit},
                )
                for unit in offered.units
            ]
        )
        told.add(done, went)

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

    def _ask(self, method: str, step: int, arguments: Mapping[str, Any]) -> Any:
        """Call the aggregator; never answered from its record of an earlier call."""
        return self._call(method, step, arguments, name=f"{method}-{next(self._numbers)}")

    def _work(self, worker: str, address: str, asked: Asked) -> Any:
        """Have a worker do something; its engine is built where it has none."""
        self._pool.ready(worker, address)
        call_id = CallId(
            run=self._caller,
            epoch=self._epoch,
            step=asked.step,
            call=f"{asked.name}@{next(self._numbers)}",
        )
        return self._pool.submit(address, asked.method, call_id, asked.arguments)

    def _check(self) -> None:
        raise_if_set(self._cancel)
        self._pool.cluster.check()


def _given_up(what: str, step: int) -> str:
    return (
        f"The {what} of step {step} were damaged or removed {MOST_OFFERS} times while they were "
        "computed. Look at the store, and at whether another flow writes to this run, which can be "
        "resumed."
    )
