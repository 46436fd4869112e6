"""Engines that train alone: the only rank of their gang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines.train.contract import TrainSpec
from engines.train.fsdp_engine import FSDPEngine
from tests.engines.train.train_ranks import spec

Join = Callable[[TrainSpec], FSDPEngine]
Make = Callable[..., FSDPEngine]


@pytest.fixture
def join() -> Iterator[Join]:
    """Makes an engine, which joins as the only rank."""
    made: list[FSDPEngine] = []

    def alone(given: TrainSpec) -> FSDPEngine:
        engine = FSDPEngine(given)
        engine.join(rank=0, world=1, host="127.0.0.1", port=0, generation=1, timeout=60.0)
        made.append(engine)
        return engine

    yield alone
    for engine in made:
        engine.close()


@pytest.fixture
def make(tmp_path: Path, join: Join) -> Make:
    """Makes an engine with these settings, of a policy where they do not say otherwise."""
    return lambda **settings: join(spec(tmp_path, **settings))
