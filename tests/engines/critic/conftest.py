"""Critics that train alone: the only rank of their gang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines.critic.engine import CriticRank
from tests.engines.train.train_ranks import spec

Make = Callable[..., CriticRank]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes a critic with these settings, which joins as the only rank."""
    made: list[CriticRank] = []

    def alone(**settings: object) -> CriticRank:
        engine = CriticRank(spec(tmp_path, role="critic", **settings))
        engine.join(rank=0, world=1, host="127.0.0.1", port=0, generation=1, timeout=60.0)
        made.append(engine)
        return engine

    yield alone
    for engine in made:
        engine.close()
