"""An aggregator and workers in this process, and an update that is carried out between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.algorithm.algorithm import AlgorithmConfig
from engines.elastic.aggregator import Aggregator
from engines.elastic.contract import Offered, UnitDone
from engines.elastic.worker import GradientEngine
from engines.train.contract import TrainSpec, UpdateResult
from storage.batches.refs import BatchRef
from tests.engines.train.conftest import join, make
from tests.engines.train.train_ranks import spec, update_of

__all__ = ["join", "make"]  # fixtures

PLAIN = AlgorithmConfig()
SETTINGS = {"engine": "elastic", "unit_tokens": 64, "micro_batch_tokens": 64}


class Elastic:
    """An aggregator, and workers whose calls are made in any order a test likes."""

    def __init__(self, given: TrainSpec, workers: int) -> None:
        self.aggregator = Aggregator(given)
        self.aggregator.join(rank=0, world=1, host="127.0.0.1", port=0, generation=1, timeout=60.0)
        self.workers = [GradientEngine(given) for _ in range(workers)]

    def open(self, batch: BatchRef, step: int = 1, **changed: Any) -> int:
        return self.aggregator.open_update(replace(update_of(batch, PLAIN, step), **changed))

    def compute(
        self, worker: int, offered: Offered, unit: int, batch: BatchRef, **changed: Any
    ) -> UnitDone:
        return self.workers[worker].gradient(
            replace(offered, units=()),
            offered.units[unit],
            replace(update_of(batch, PLAIN, offered.of.step), **changed),
        )

    def update(
        self,
        batch: BatchRef,
        step: int = 1,
        order: Callable[[int], Sequence[int]] = range,
        **changed: Any,
    ) -> UpdateResult:
        """A whole update; units go round the workers in an order made of their number."""
        for _ in range(self.open(batch, step, **changed)):
            offered = self.aggregator.offer(step)
            for turn, unit in enumerate(order(len(offered.units))):
                self.compute(turn % len(self.workers), offered, unit, batch, **changed)
            assert self.aggregator.apply().refused == {}
        return self.aggregator.close_update()

    def close(self) -> None:
        for engine in (self.aggregator, *self.workers):
            engine.close()


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[Callable[..., Elastic]]:
    """Makes an aggregator with workers, of these settings."""
    made: list[Elastic] = []

    def make(workers: int = 1, run: str = "run", **train: Any) -> Elastic:
        made.append(Elastic(spec(tmp_path, run=run, **{**SETTINGS, **train}), workers))
        return made[-1]

    yield make
    for one in made:
        one.close()
