"""An engine on another machine than its trainer's gets a version that the store does not have yet."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from configs.rollout import RolloutConfig
from engines.rollout.contract import RolloutSpec, SyncReport
from engines.rollout.hf_engine import HFEngine
from engines.train.fsdp_engine import FSDPEngine
from storage.objects.node_cache import NodeCache, WriteBehind
from storage.objects.store import Store
from storage.runs.weights import WeightsRef, open_manifest
from storage.runs.weights_writing import MANIFEST
from tests.engines.train.train_ranks import MODEL, spec

FORM = "float32"
KEPT = 2**28  # bytes that a machine keeps
TIMEOUT = 30.0


class Apart:
    """A trainer and an engine with a store between them, which gets nothing until `reached` is set."""

    def __init__(self, folder: Path) -> None:
        uri = f"memory://{uuid.uuid4().hex}"  # counts as remote
        kept: dict[str, Any] = {"store_uri": uri, "node_cache_bytes": KEPT}
        self.store = Store(uri)
        self.reached = threading.Event()
        self.trainer = FSDPEngine(spec(folder).model_copy(update=kept))
        self.trainer.join(0, 1, "127.0.0.1", 0, 1, 60.0)
        self.engine = HFEngine(
            RolloutSpec(
                model=MODEL,
                model_cache=str(folder / "models"),
                rollout=RolloutConfig(engine="transformers", dtype=FORM),
                max_model_len=64,
                **kept,
            )
        )
        self.engine._node_cache = NodeCache(self.store, folder / "elsewhere", KEPT)

    def stored(self, weights: WeightsRef) -> bool:
        return self.store.exists(f"{weights.key}/{MANIFEST}")


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Apart]:
    made, copy = Apart(tmp_path), WriteBehind._copy

    def once_reached(self: WriteBehind, *given: Any) -> None:
        assert made.reached.wait(120)
        copy(self, *given)

    monkeypatch.setattr(WriteBehind, "_copy", once_reached)
    yield made
    made.reached.set()
    made.engine.close()
    made.trainer.close()


@pytest.mark.parametrize("way", ["ipc", "nccl"])
def test_it_is_sent_meanwhile(apart: Apart, way: Any) -> None:
    weights = apart.trainer.export_weights(0, FORM)
    offer = apart.trainer.offer_transfer(0, FORM, way, 1, TIMEOUT)
    with ThreadPoolExecutor(1) as beside:
        syncing = beside.submit(apart.engine.sync, weights, "idle", offer)
        assert apart.trainer.transfer_weights(0, FORM).served == 1
        report = syncing.result()
    assert report.transferred and report.digest == weights.digest
    assert not apart.stored(weights)
    apart.reached.set()
    assert apart.trainer.settle_weights(0, FORM) == weights
    assert open_manifest(apart.store, weights).digest == report.digest


def test_who_misses_it_waits_until_the_store_has_it(apart: Apart) -> None:
    weights = apart.trainer.export_weights(0, FORM)
    offer = apart.trainer.offer_transfer(0, FORM, "nccl", 1, TIMEOUT)
    apart.trainer._transfers().close()  # it lets nobody in

    def sync() -> SyncReport:
        return apart.engine.sync(weights, offer=offer)

    with ThreadPoolExecutor(1) as beside:
        syncing = beside.submit(sync)
        time.sleep(0.5)
        assert not syncing.done() and apart.engine.version is None
        apart.reached.set()
        apart.trainer.settle_weights(0, FORM)
        report = syncing.result()
    assert "is not reached" in report.missed and not report.transferred
    assert report.waited > 0 and report.digest == weights.digest
