"""Sharded weights reach receivers whole, from any number of ranks, as versions have them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from configs.algorithm.algorithm import AlgorithmConfig
from engines.train import transfer
from engines.train.fsdp_engine import FSDPEngine
from engines.weight_transfer.offer import Transfer
from engines.weight_transfer.receiver import Receiver
from storage.objects.store import Store
from storage.runs.weights import open_manifest, tensor_digest, weights_digest
from tests.engines.train.train_ranks import Ranks, samples, spec, stored, update_of

CPU = torch.device("cpu")
PIECE = 10_000


def received(engine: FSDPEngine, way: Transfer, version: int, first: bool) -> str:
    """The digest of what a receiver beside rank 0 gets of a version."""
    offer = engine.offer_transfer(version, "bfloat16", way, 1, 30.0)
    with ThreadPoolExecutor(1) as beside:
        digest = beside.submit(attested, offer).result if first else lambda: ""
        report = engine.transfer_weights(version, "bfloat16")
        assert report.served == 1, report
        return digest()


def attested(offer: object) -> str:
    pairs = Receiver(CPU).tensors(offer)  # type: ignore[arg-type]
    outlines = offer.tensors  # type: ignore[attr-defined]
    return weights_digest(
        (name, outlines[name].dtype, outlines[name].shape, tensor_digest(tensor))
        for name, tensor in pairs
    )


def scenario(rank: int, world: int, ports: list[int], folder: Path) -> dict[str, str]:
    transfer.WeightSending.offer.__defaults__ = (PIECE,)
    batch = stored(folder, samples(), f"batch-{rank}-{world}")
    engine = FSDPEngine(
        spec(folder, run=f"of-{world}", weights_dtype="float32").model_copy(
            update={"whole_every": 4}
        )
    )
    engine.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)
    digests = {}
    for version in (0, 1):
        if version:
            engine.update(update_of(batch, AlgorithmConfig(), version))
        weights = engine.export_weights(version, "bfloat16")
        engine.settle_weights(version, "bfloat16")
        digests[f"stored {version}"] = weights.digest
        for way in ("ipc", "nccl"):
            digests[f"{way} {version}"] = received(engine, way, version, rank == 0)
    store = Store(str(folder / "store"))
    digests["form"] = "whole" if open_manifest(store, weights).base is None else "difference"
    # Ranks whose devices differ have buffers each, of which the receiver opens its own device's.
    if world > 1:
        engine._transfers()._places = []
        places = transfer.place_of
        transfer.place_of = lambda device: f"device {rank}"  # type: ignore[assignment]
        from engines.weight_transfer import receiver

        receiver.place_of = lambda device: "device 1"  # type: ignore[assignment]
        digests["second rank's"] = received(engine, "ipc", 1, rank == 0)
        transfer.place_of = places
    engine.leave()
    return digests


@pytest.fixture(scope="module", params=[1, 2])
def seen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[dict[str, str]]]:
    ranks = Ranks(request.param)
    yield ranks.run(scenario, tmp_path_factory.mktemp("ranks"))
    ranks.close()


def test_digests_are_those_of_the_store(seen: list[dict[str, str]]) -> None:
    first = seen[0]
    assert first["stored 0"] != first["stored 1"]
    for version in (0, 1):
        for way in ("ipc", "nccl"):
            assert first[f"{way} {version}"] == first[f"stored {version}"]


def test_what_is_stored_as_a_difference_is_sent_whole(seen: list[dict[str, str]]) -> None:
    assert seen[0]["form"] == "difference"


def test_a_receiver_on_the_second_ranks_device(seen: list[dict[str, str]]) -> None:
    if len(seen) > 1:
        assert seen[0]["second rank's"] == seen[0]["stored 1"]
