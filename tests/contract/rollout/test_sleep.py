"""Sleep and wake of rollout engines. vLLM goes to sleep on GPUs only."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch

from engines.rollout.contract import NoWeights, RolloutCancelled
from engines.rollout.engine import RolloutEngine
from engines.rollout.hf_engine import HFEngine
from tests.contract.rollout.world import LONG, SHORT, World, begun


@pytest.fixture
def engine(built: Callable[[str], RolloutEngine], world: World) -> HFEngine:
    found = cast("HFEngine", built("transformers"))
    found.sync(world.weights[0])
    return found


def held(engine: HFEngine) -> int:
    """Bytes below the model's weights."""
    state = engine._model.state_dict().values()
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in state}.values())


def tokens(engine: RolloutEngine, world: World) -> list:
    return world.column(engine.generate(world.request(world.prompts(), SHORT)), "response_ids")


@pytest.mark.parametrize("level", [1, 2])
def test_what_sleeps_holds_no_memory_and_no_version(
    engine: HFEngine, world: World, level: int
) -> None:
    before, drawn = held(engine), tokens(engine, world)
    moved = engine.sleep(level)
    assert moved.nbytes == before > 0
    assert held(engine) == 0
    assert engine.status().state == "asleep"
    assert engine.version is None
    with pytest.raises(NoWeights, match="asleep"):
        tokens(engine, world)
    with pytest.raises(NoWeights, match="asleep"):
        engine.score([[5, 6, 7]], [1])
    assert engine.sleep(level).nbytes == 0, "it sleeps already"
    woken = engine.wake()
    assert woken.nbytes == held(engine) == before
    if level == 1:  # the same bits, so the same version
        assert woken.digest == world.weights[0].digest
        assert engine.version == 0
    else:
        assert woken.digest == ""
        with pytest.raises(NoWeights):
            tokens(engine, world)
        engine.sync(world.weights[0])
    assert tokens(engine, world) == drawn


def test_weights_that_changed_in_its_sleep_are_no_version(engine: HFEngine, world: World) -> None:
    engine.sleep(1)
    copy = engine._storages._away[0].copy
    assert copy is not None
    copy[0] ^= 1
    assert engine.wake().digest == ""
    with pytest.raises(NoWeights):
        tokens(engine, world)
    engine.sync(world.weights[0])


def test_a_sync_wakes(engine: HFEngine, world: World) -> None:
    engine.sleep(2)
    assert engine.sync(world.weights[1]).digest == world.weights[1].digest
    assert engine.version == 1
    assert tokens(engine, world)


def test_an_engine_that_holds_nothing_wakes_with_nothing(engine: HFEngine, world: World) -> None:
    engine.sleep(2)
    engine.wake()
    engine.sleep(1)
    assert engine.wake().digest == ""
    assert engine.version is None


def test_shards_in_flight_end(engine: HFEngine, world: World, threads: ThreadPoolExecutor) -> None:
    shard = begun(engine, threads, world.request(world.prompts(), LONG))
    engine.sleep(2)
    with pytest.raises(RolloutCancelled):
        shard.result(30)
    engine.sync(world.weights[0])
    with torch.inference_mode():
        assert tokens(engine, world)
