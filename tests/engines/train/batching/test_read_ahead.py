"""Micro-batches are read ahead, in their order, and an error comes at its turn."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from engines.start_progress import StartProgress, heard_by
from engines.train.batching import micro_batch as module
from engines.train.batching.micro_batch import MicroBatch, read_ahead, read_micro_batch
from storage.objects.store import Store
from tests.engines.train.train_ranks import samples, stored

CPU = torch.device("cpu")
PARTS = [(0, 3), (), (1, 2), (5,)]


def test_micro_batches_come_in_their_order(tmp_path: Path) -> None:
    batch, store = stored(tmp_path, samples(), "batch"), Store(str(tmp_path / "store"))
    with read_ahead(store, batch, PARTS, ["advantages"], CPU) as micros:
        found = list(micros)
    expected = [read_micro_batch(store, batch, rows, ["advantages"], CPU) for rows in PARTS]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.packed.tokens, other.packed.tokens)
        assert torch.equal(one.columns["advantages"], other.columns["advantages"])
    with read_ahead(store, batch, [], [], CPU) as micros:
        assert list(micros) == []


def test_who_looks_on_knows_which_one_is_used(tmp_path: Path) -> None:
    batch, store = stored(tmp_path, samples(), "batch"), Store(str(tmp_path / "store"))
    progress, phases = StartProgress(), []
    with heard_by(progress.heard), read_ahead(store, batch, PARTS, [], CPU) as micros:
        for _ in micros:
            phases.append(progress.phase)
    assert phases == [f"micro-batch {number} of 4" for number in (1, 2, 3, 4)]


def test_the_next_is_read_while_one_is_used_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, store = stored(tmp_path, samples(), "batch"), Store(str(tmp_path / "store"))
    begun = [threading.Event() for _ in PARTS]

    def noted(store: Store, batch: object, rows: tuple[int, ...], *others: object) -> MicroBatch:
        begun[PARTS.index(rows)].set()
        if rows == PARTS[2]:
            raise RuntimeError("the third cannot be read")
        return read_micro_batch(store, batch, rows, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "read_micro_batch", noted)
    with read_ahead(store, batch, PARTS, [], CPU) as micros:
        next(micros)
        assert begun[1].wait(30), "nothing was read while the first was used"
        assert not begun[2].is_set()
        next(micros)
        assert begun[2].wait(30)
        with pytest.raises(RuntimeError, match="third"):
            next(micros)
    assert not begun[3].is_set()
