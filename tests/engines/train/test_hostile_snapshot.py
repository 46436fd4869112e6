"""A snapshot's index is forged, with its digest right: one sentence, and nothing is taken from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.failures import WeightMismatch
from engines.models.adapters import factor_names, merge
from engines.train.snapshots import load_snapshot, save_snapshot
from storage.objects import documents
from storage.objects.errors import ObjectDamaged
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from storage.runs.snapshots import INDEX, check_pieces
from storage.runs.weights import Adapter
from tests.faults.test_malformed import group


@pytest.fixture
def run(tmp_path: Path) -> RunStore:
    run = RunStore(Store(f"file://{tmp_path}/store"), "run")
    tensors = {"w": torch.arange(64.0).reshape(8, 8), "count": torch.tensor(3.0)}
    save_snapshot(run, 1, tensors, {"step": 1}, group())
    return run


def asked() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(8, 8), "count": torch.zeros(())}


def test_what_was_written_is_read(run: RunStore) -> None:
    found = asked()
    assert load_snapshot(run, 1, found, group()) == {"step": 1}
    assert found["w"].flatten().tolist() == list(range(64))
    check_pieces(run, run.state_key(1))


def piece(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["tensors"]["w"]["chunks"][0]
    return found


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file above the folder": lambda body: piece(body).update(file="../../../secret"),
    "an absolute file": lambda body: piece(body).update(file="/etc/passwd"),
    "a file that the marker does not name": lambda body: piece(body).update(file="other"),
    "no number format": lambda body: piece(body).update(dtype="F8"),
    "another number format": lambda body: piece(body).update(dtype="U8"),
    "a negative place": lambda body: piece(body).update(bytes=[-256, 0]),
    "a huge place": lambda body: piece(body).update(bytes=[2**70, 2**70 + 256]),
    "a place of one number": lambda body: piece(body).update(bytes=[0]),
    "a huge shape": lambda body: piece(body).update(shape=[2**40, 2**40]),
    "a shape that torch would spread": lambda body: piece(body).update(shape=[1, 8], bytes=[0, 32]),
    "a shape of other dimensions": lambda body: piece(body).update(shape=[64]),
    "negative offsets": lambda body: piece(body).update(offsets=[-8, 0]),
    "huge offsets": lambda body: piece(body).update(offsets=[2**70, 0]),
    "offsets of other dimensions": lambda body: piece(body).update(offsets=[0]),
    "no offsets but text": lambda body: piece(body).update(offsets="00"),
    "a huge tensor": lambda body: body["tensors"]["w"].update(shape=[2**62, 2**62]),
    "no pieces": lambda body: body["tensors"]["w"].update(chunks=[]),
    "a tensor that is none": lambda body: body["tensors"].update(w=3),
    "no tensors": lambda body: body.pop("tensors"),
    "no facts": lambda body: body.pop("facts"),
    "facts that are no numbers": lambda body: body["facts"].update(step="one"),
    "a piece without digest": lambda body: piece(body).pop("digest"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_index(run: RunStore, name: str) -> None:
    key = f"{run.state_key(1)}/{INDEX}"
    document = json.loads(run.store.read(key))
    FORGERIES[name](document["body"])
    run.store.write(key, documents.encode(document["format"], document["body"]))
    found = asked()
    for read in (
        lambda: load_snapshot(run, 1, found, group()),
        lambda: check_pieces(run, run.state_key(1)),
    ):
        with pytest.raises(ObjectDamaged, match=f"{key} is no valid state") as error:
            read()
        assert "\n" not in str(error.value)
    assert not found["w"].any()


@pytest.mark.parametrize(
    ("a", "b"),
    [((2, 8), (10**6, 2)), ((2, 10**6), (8, 2)), ((1, 8), (8, 2)), ((2, 8), (8,)), ((), ())],
)
def test_factors_of_an_adapter_multiply_to_the_weight_alone(
    a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    """Two factors of a few megabytes have a product of any size, and [8, 1] would be spread."""
    name = "model.q_proj.weight"
    one, other = factor_names(name)
    factors = {one: torch.zeros(a), other: torch.zeros(b)}
    with pytest.raises(WeightMismatch, match="do not multiply to its"):
        merge(name, torch.zeros(8, 8), factors, Adapter(rank=2, alpha=1.0))
    fit = {one: torch.ones(2, 8), other: torch.ones(8, 2)}
    assert (merge(name, torch.zeros(8, 8), fit, Adapter(rank=2, alpha=1.0)) == 1).all()
