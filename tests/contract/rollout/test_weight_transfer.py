"""An engine gets a version from its trainer, with the digest that the store's copy has, or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.failures import WeightMismatch
from engines.rollout.contract import NoWeights, SyncReport
from engines.rollout.engine import RolloutEngine
from engines.train.publication import outlines_of
from engines.train.transfer import WeightSending
from engines.weight_transfer.offer import Transfer, TransferReport
from storage.runs.weights import WeightsRef
from tests.contract.rollout.world import SHORT, World

PIECE = 100_000  # bytes, of which the model has several
TIMEOUT = 60.0


class Sending:
    """A trainer of one rank, which has other weights than the engine."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.rank = WeightSending(
            dist.ProcessGroup(dist.HashStore(), 0, 1), torch.device("cpu"), "127.0.0.1"
        )
        self.threads = ThreadPoolExecutor(1)

    def close(self) -> None:
        self.rank.close()
        self.threads.shutdown()

    def sync(
        self,
        way: Transfer,
        weights: WeightsRef,
        state: dict[str, Tensor],
        sent: dict[str, Tensor] | None = None,
    ) -> tuple[SyncReport, TransferReport]:
        """What engine and trainer report; sent: tensors in place of those."""
        outlines = outlines_of(state, None, ())
        offer = self.rank.offer(way, weights.version, outlines, 1, TIMEOUT, piece=PIECE)
        sending = self.threads.submit(self.rank.send, weights.version, sent or state)
        try:
            report = self.engine.sync(weights, offer=offer)
        finally:
            sending.result()
        return report, sending.result()


@pytest.fixture
def trainer(engine: RolloutEngine) -> Iterator[Sending]:
    made = Sending(engine)
    yield made
    made.close()


def state(world: World, version: int) -> dict[str, Tensor]:
    return dict(world.policies[version].state_dict())


def drawn(engine: RolloutEngine, world: World) -> list[list[int]]:
    result = engine.generate(world.request(world.prompts(), SHORT, step=7))
    return world.column(result, "response_ids")


@pytest.mark.parametrize("way", ["ipc", "nccl"])
def test_the_same_version_as_by_the_store(
    engine: RolloutEngine, world: World, trainer: Sending, way: Transfer
) -> None:
    expected = {}
    for version in (0, 1):
        engine.sync(world.weights[version])
        expected[version] = drawn(engine, world)
    assert expected[0] != expected[1]
    for version in (0, 1, 0):
        report, sent = trainer.sync(way, world.weights[version], state(world, version))
        assert report.transferred, report.missed
        assert sent.served == 1
        assert report.digest == world.weights[version].digest
        assert report.tensors == len(state(world, version))
        assert report.nbytes == world.weights[version].nbytes
        assert drawn(engine, world) == expected[version]


@pytest.mark.parametrize("way", ["ipc", "nccl"])
def test_other_bytes_are_an_error_and_never_sampled_from(
    engine: RolloutEngine, world: World, trainer: Sending, way: Transfer
) -> None:
    engine.sync(world.weights[0])
    flipped = {name: tensor.clone() for name, tensor in state(world, 1).items()}
    name = sorted(flipped)[3]
    flipped[name].view(-1).view(torch.uint8)[0] ^= 1
    with pytest.raises(WeightMismatch, match="loaded policy version 1 with digest"):
        trainer.sync(way, world.weights[1], state(world, 1), flipped)
    with pytest.raises(NoWeights):
        drawn(engine, world)
    assert trainer.sync(way, world.weights[1], state(world, 1))[0].transferred


def ended_after(rank: WeightSending, pieces: int) -> Callable[..., bool]:
    """A trainer that lets everybody go in the middle, as one that dies does."""
    over, sent = rank._over, iter(range(10_000))

    def until(*arguments: Any) -> bool:
        if next(sent) == pieces:
            assert rank._sender is not None
            rank._sender.close()
        return over(*arguments)

    return until


@pytest.mark.parametrize("way", ["ipc", "nccl"])
def test_a_transfer_that_ends_in_the_middle_becomes_a_load_from_the_store(
    engine: RolloutEngine,
    world: World,
    trainer: Sending,
    way: Transfer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine.sync(world.weights[1])
    expected = drawn(engine, world)
    engine.sync(world.weights[0])
    monkeypatch.setattr(trainer.rank, "_over", ended_after(trainer.rank, 3))
    began = time.monotonic()
    report, sent = trainer.sync(way, world.weights[1], state(world, 1))
    assert not report.transferred
    assert report.missed
    assert sent.served == 0
    assert report.digest == world.weights[1].digest
    assert report.tensors == len(state(world, 1)), "all of them, from the store"
    assert drawn(engine, world) == expected
    assert time.monotonic() - began < TIMEOUT
    monkeypatch.undo()
    assert trainer.sync(way, world.weights[0], state(world, 0))[0].transferred


def test_a_trainer_that_is_gone(engine: RolloutEngine, world: World, trainer: Sending) -> None:
    outlines = outlines_of(state(world, 1), None, ())
    offer = trainer.rank.offer("nccl", 1, outlines, 1, TIMEOUT)
    trainer.rank.close()
    report = engine.sync(world.weights[1], offer=offer)
    assert "is not reached" in report.missed
    assert (report.version, report.digest) == (1, world.weights[1].digest)


def test_a_version_that_does_not_fit_is_refused_before_anything_is_sent(
    engine: RolloutEngine, world: World, trainer: Sending
) -> None:
    engine.sync(world.weights[0])
    outlines = outlines_of(state(world, 1), None, ())
    name = next(iter(outlines))
    offer = trainer.rank.offer(
        "ipc", 1, {each: one for each, one in outlines.items() if each != name}, 1, TIMEOUT
    )
    with pytest.raises(WeightMismatch, match="has no tensor"):
        engine.sync(world.weights[1], offer=offer)
    assert drawn(engine, world), "it still has the version before"
