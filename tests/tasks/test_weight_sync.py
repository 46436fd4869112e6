"""When the trainer is asked to wait for the store, and that the engines need not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from engines.failures import InfrastructureError, WeightMismatch, WorkerLost
from engines.rollout.weight_probe import Probe
from engines.weight_transfer.offer import TransferOffer
from storage.runs.weights import WeightsRef
from tasks import weight_sync
from tasks.run.roles import ACTOR, ROLLOUT

REF = WeightsRef(version=3, key="runs/r/weights/3", digest="d", nbytes=8)
SLOW = 0.3  # seconds for which the store has it later


def a_run(
    calls: list[str], kept: bool, shared: bool = False, digest: str = "d", way: str = "store"
) -> Mock:
    """A run whose trainer and engines note when they are done."""

    def settle(*given: object) -> WeightsRef:
        time.sleep(SLOW)
        calls.append("settle")
        return REF.model_copy(update={"digest": digest})

    def sync(
        weights: WeightsRef, probe: Probe, offered: Callable[[int], TransferOffer] | None
    ) -> dict[str, Any]:
        if offered is not None:
            offered(1)
        calls.append("sync")
        report = SimpleNamespace(
            seconds=0.0, waited=0.0, transferred=offered is not None, missed=""
        )
        return {"rollout-0": SimpleNamespace(report=report, logprob_error=0.0)}

    run = Mock(start=0, head=2)
    run.config.max_staleness = 1
    clients = {ACTOR: Mock(), ROLLOUT: Mock()}
    run.engines = MagicMock()
    run.engines.__getitem__.side_effect = clients.__getitem__
    run.probe.return_value = ([[1, 2]], [1])
    run.files.store.backend.remote = True
    run.config.rollout.weight_transfer = way
    run.config.store.node_cache_bytes = 1024 if kept else 0
    run.config.cluster.share_devices = shared
    run.engines[ACTOR].export.return_value = REF
    run.engines[ACTOR].send.side_effect = lambda *given: calls.append("send") or Mock(why="")
    run.engines[ACTOR].score.return_value = [[0.0]]
    run.engines[ACTOR].settle.side_effect = settle
    run.engines[ROLLOUT].sync.side_effect = sync
    run.engines.holding.return_value = contextlib.nullcontext()
    return run


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Prefect task around it."""
    monkeypatch.setattr(weight_sync, "attempted", lambda *_: contextlib.nullcontext(Mock()))


@pytest.mark.parametrize(
    ("kept", "shared", "order"),
    [
        (False, False, ["sync"]),  # the store has it when it is exported
        (True, False, ["sync", "settle"]),
        (True, True, ["settle", "sync"]),  # engines that have loaded keep the devices
    ],
)
def test_order(kept: bool, shared: bool, order: list[str]) -> None:
    calls: list[str] = []
    synced = weight_sync.publish_and_sync(a_run(calls, kept, shared), 3, 3)
    assert calls == order
    later = synced.metrics["weights/stored_seconds"] - synced.metrics["weights/publish_seconds"]
    assert (later >= SLOW) == kept


@pytest.mark.parametrize("remote", [True, False])
def test_engines_are_sent_a_version_that_is_on_its_way_to_the_store(remote: bool) -> None:
    calls: list[str] = []
    run = a_run(calls, kept=True, way="nccl")
    run.files.store.backend.remote = remote
    synced = weight_sync.publish_and_sync(run, 3, 3)
    assert sorted(calls[:2]) == ["send", "sync"] and calls[2:] == ["settle"]
    assert synced.metrics["weights/transferred"] == 1


def test_engines_do_not_wait_for_the_disk_of_a_local_store() -> None:
    calls: list[str] = []
    run = a_run(calls, kept=False)
    run.files.store.backend.remote = False
    weight_sync.publish_and_sync(run, 3, 3)
    assert calls == ["sync", "settle"]


@pytest.mark.parametrize("way", ["store", "nccl"])
def test_other_weights_in_the_store_than_in_the_engines(way: str) -> None:
    run = a_run([], kept=True, digest="other", way=way)
    with pytest.raises(WeightMismatch, match=r"digest other, not d.*max_staleness = 1 samples may"):
        weight_sync.publish_and_sync(run, 3, 3)
    run.config.max_staleness = 0  # no sample is of them: the next attempt loads what the store has
    with pytest.raises(InfrastructureError, match=r"digest other, not d.* load it again"):
        weight_sync.publish_and_sync(run, 3, 3)
    run.head = 3
    with pytest.raises(WeightMismatch, match="digest other, not d"):
        weight_sync.publish_and_sync(run, 3, 3)


@pytest.mark.parametrize(
    ("shared", "order"),
    [
        (False, ["load", "score", "compare"]),
        (True, ["score", "load", "compare"]),  # else the trainer would take the devices
    ],
)
def test_the_trainer_scores_the_probe_while_engines_load(shared: bool, order: list[str]) -> None:
    calls: list[str] = []
    run = a_run([], kept=False, shared=shared)

    def score(*given: object) -> list[list[float]]:
        time.sleep(SLOW)
        calls.append("score")
        return [[-0.5]]

    def sync(weights: WeightsRef, probe: Probe, offered: None) -> dict[str, Any]:
        calls.append("load")
        assert probe.expected() == [[-0.5]]
        calls.append("compare")
        report = SimpleNamespace(seconds=0.0, waited=0.0)
        return {"rollout-0": SimpleNamespace(report=report, logprob_error=0.0)}

    run.engines[ACTOR].score.side_effect = score
    run.engines[ROLLOUT].sync.side_effect = sync
    weight_sync.publish_and_sync(run, 3, 3)
    assert calls == order


def test_a_trainer_that_fails_to_score_is_what_the_step_fails_of() -> None:
    run = a_run([], kept=False)
    run.engines[ACTOR].score.side_effect = WorkerLost("train-0", "killed")
    run.engines[ROLLOUT].sync.side_effect = lambda weights, probe, offered: probe.expected()
    with pytest.raises(WorkerLost, match="train-0"):
        weight_sync.publish_and_sync(run, 3, 3)
