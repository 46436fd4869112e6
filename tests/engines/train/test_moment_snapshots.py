"""Snapshots of moments in eight bits and of remainders: by other numbers of ranks, and by other kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from configs.algorithm.algorithm import AlgorithmConfig
from engines.train.fsdp_engine import FSDPEngine
from storage.batches.refs import BatchRef
from tests.engines.train.conftest import Make
from tests.engines.train.train_ranks import Ranks, samples, spec, stored, update_of

SETTINGS = {
    "compute_dtype": "bfloat16",
    "weights_dtype": "bfloat16",
    "master_weights": "remainder",
    "optimizer_dtype": "8bit",
    "micro_batch_tokens": 64,
}
State = dict[str, torch.Tensor]


def state_of(engine: FSDPEngine) -> State:
    """Moments, masters and weights, whole; a collective."""
    optimizer = engine._trained()
    held = {**optimizer.moments(), **optimizer.parameters}
    held |= {f"master.{n}": engine._masters.of(one) for n, one in optimizer.parameters.items()}
    whole = (one.full_tensor() if isinstance(one, DTensor) else one for one in held.values())
    return {name: one.detach().clone() for name, one in zip(held, whole, strict=True)}


def trained(
    rank: int, world: int, ports: list[int], folder: Path, batch: BatchRef, load: bool, run: str
) -> State:
    """The state of two updates and a snapshot, or of the snapshot that there is."""
    engine = FSDPEngine(spec(folder, run=run, **SETTINGS))
    engine.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)
    if load:
        engine.load_state(2)
    else:
        for step in (1, 2):
            engine.update(update_of(batch, AlgorithmConfig(), step))
        engine.save_state(2)
    found = state_of(engine)
    engine.leave()
    return found


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("loading", [1, 2])
def test_another_number_of_ranks_takes_the_same_state(
    tmp_path: Path, pair: Ranks, loading: int
) -> None:
    """Rows are shared unevenly: 101 over two."""
    batch = stored(tmp_path, samples())
    alone: Ranks = Ranks(1)
    try:
        given: tuple[Any, ...] = (tmp_path, batch)
        saved, loaded = (alone, pair) if loading == 2 else (pair, alone)
        before = saved.run(trained, *given, False, "run")[0]
        after = loaded.run(trained, *given, True, "run")[0]
    finally:
        alone.close()
    assert before.keys() == after.keys()
    assert any(one.dtype == torch.uint8 and one.any() for one in before.values())
    for name, one in before.items():
        assert torch.equal(one, after[name]), name


@pytest.mark.parametrize(("was", "now"), [("8bit", "float32"), ("float32", "8bit")])
def test_moments_of_another_kind_are_not_taken(
    tmp_path: Path, make: Make, was: str, now: str
) -> None:
    one, other = (make(run="run", optimizer_dtype=dtype) for dtype in (was, now))
    one.save_state(1)
    with pytest.raises(RuntimeError, match=r"optimizer_dtype|exp_avg_largest"):
        other.load_state(1)
