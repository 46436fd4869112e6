"""A train engine off its device and back: its memory is free meanwhile, and nothing has changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from configs.algorithm.algorithm import AlgorithmConfig
from engines.train.fsdp_engine import FSDPEngine
from engines.train.memory import on_device
from tests.engines.train.train_ranks import (
    Ranks,
    samples,
    spec,
    stored,
    update_of,
)
from tests.ports import free_ports


def joined(
    folder: Path, rank: int = 0, world: int = 1, port: int = 0, **train: object
) -> FSDPEngine:
    engine = FSDPEngine(spec(folder, **train))
    engine.join(rank, world, "127.0.0.1", port or free_ports(1)[0], 1, 60.0)
    return engine


def size(tensors: list[Tensor]) -> int:
    """Bytes of the memory below tensors."""
    own = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    found = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in own}
    return sum(found.values())


def held(engine: FSDPEngine) -> int:
    return size(on_device(engine._loaded(), engine._optimizer, engine._device))


def trained(folder: Path, rank: int, world: int, port: int, away: bool, **train: object) -> str:
    """Digest after three updates with everything else between them; `away`: off the device too."""
    engine = joined(folder, rank, world, port, **train)
    batch = stored(folder, samples(), f"batch{rank}")
    for step in (1, 2, 3):
        if away:
            before = held(engine)
            moved = engine.offload()
            assert held(engine) == 0
            assert moved.nbytes == before > 0
            assert engine.memory_held("host") == {next(iter(engine.memory_held("host"))): before}
            assert engine.onload().nbytes == before
            assert held(engine) == before
        engine.update(update_of(batch, AlgorithmConfig(), step))
        engine.export_weights(step, "float32")
        engine.save_state(step)
        engine.score([[5, 6, 7, 8]], [2])
    digest = engine.digest()
    engine.close()
    return digest


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"optimizer_dtype": "bfloat16"},
        {"optimizer_dtype": "8bit"},
        {"compute_dtype": "bfloat16", "weights_dtype": "bfloat16"},
        {
            "compute_dtype": "bfloat16",
            "weights_dtype": "bfloat16",
            "master_weights": "remainder",
            "optimizer_dtype": "8bit",
        },
    ],
)
def test_weights_gradients_and_optimizer_come_back_the_same(
    tmp_path: Path, train: dict[str, object]
) -> None:
    digests = [
        trained(tmp_path / str(away), 0, 1, free_ports(1)[0], away, **train)
        for away in (False, True)
    ]
    assert digests[0] == digests[1]


def test_a_call_on_an_engine_that_is_away_is_an_error(tmp_path: Path) -> None:
    engine = joined(tmp_path)
    engine.offload()
    with pytest.raises(RuntimeError, match="off its device"):
        engine.digest()
    engine.onload()
    assert engine.digest()
    engine.close()


def _rank(rank: int, world: int, ports: list[int], folder: Path, away: bool) -> str:
    return trained(folder, rank, world, ports[0], away)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(2)
    yield made
    made.close()


def test_two_ranks_come_back_the_same(tmp_path: Path, ranks: Ranks) -> None:
    digests = [ranks.run(_rank, tmp_path / str(away), away) for away in (False, True)]
    assert digests[0] == digests[1]
