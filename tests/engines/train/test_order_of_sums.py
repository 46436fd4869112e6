"""Sums in a fixed order, and how far weights are apart where they come in another one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.algorithm.algorithm import AlgorithmConfig
from configs.train import TrainConfig
from engines.train.contract import MadeOn, UpdateResult
from engines.train.fsdp_engine import FSDPEngine
from engines.train.updater import PolicyUpdater, in_fixed_order, made_on
from storage.batches.refs import BatchRef
from tasks.commands.replay import TOLERANCE, share_of_way
from tests.engines.train.conftest import Make
from tests.engines.train.train_ranks import samples, stored, update_of


@pytest.fixture(autouse=True)
def as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier engine that sums in a fixed order has not told cuBLAS so."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


def update(engine: FSDPEngine, batch: BatchRef, step: int = 1) -> UpdateResult:
    return engine.update(update_of(batch, AlgorithmConfig(), step))


def test_an_update_asks_torch_for_a_fixed_order(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the update alone; on a CPU, where the order is fixed, the weights are the same."""
    batch = stored(tmp_path, samples())
    plain = make(run="plain")
    update(plain, batch)
    asked: list[bool] = []
    usual = PolicyUpdater._loss

    def seen(self: PolicyUpdater, *given: Any) -> Any:
        asked.append(torch.are_deterministic_algorithms_enabled())
        return usual(self, *given)

    monkeypatch.setattr(PolicyUpdater, "_loss", seen)
    engine = make(run="fixed", deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert update(engine, batch).made_on.fixed
    assert asked == [True] * len(asked) != []
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert engine.digest() == plain.digest()


def test_the_order_is_given_back_after_an_error() -> None:
    with pytest.raises(KeyError), in_fixed_order(True):
        raise KeyError("no matter")
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("settings", "device", "fixed"),
    [
        ({}, "cpu", True),
        ({"compile": True}, "cpu", False),
        ({}, "cuda", False),
        ({"deterministic": True}, "cuda", True),
        ({"compile": True}, "cuda", False),
    ],
)
def test_what_an_update_was_made_on(
    settings: dict[str, Any], device: str, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda which: "NVIDIA H100")
    found = made_on(TrainConfig(**settings), torch.device(device))
    assert (found.fixed, found.torch) == (fixed, torch.__version__)
    assert found.device == "NVIDIA H100" if device == "cuda" else found.device.startswith("CPU (")
    assert MadeOn.of({"device": found.device, "torch": found.torch, "fixed": fixed}) == found


def test_compiled_layers_have_no_fixed_order() -> None:
    with pytest.raises(ValueError, match=r"train\.deterministic = true does not go with train\.co"):
        TrainConfig(compile=True, deterministic=True)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_tolerance_is_above_rounding_and_below_another_update(
    make: Make, tmp_path: Path, compute: str
) -> None:
    """Micro-batches of another size add in another order; published in bfloat16, as runs are."""
    batch, other = stored(tmp_path, samples(0), "one"), stored(tmp_path, samples(1), "other")
    first = make(run=f"{compute}-first", compute_dtype=compute)
    start = first.export_weights(0, "bfloat16")
    update(first, batch)
    weights = first.export_weights(1, "bfloat16")
    again = make(run=f"{compute}-again", compute_dtype=compute, micro_batch_tokens=64)
    way = again.compare(weights, "bfloat16")
    update(again, batch)
    rounding = share_of_way(again.compare(weights, "bfloat16"), way)
    again.load_weights(start, 0)
    update(again, other)
    another = share_of_way(again.compare(weights, "bfloat16"), way)
    print(f"share of the way, {compute}: rounding {rounding:.5f}, another batch {another:.3f}")
    assert 0 < rounding < TOLERANCE / 2
    assert another > 5 * TOLERANCE
