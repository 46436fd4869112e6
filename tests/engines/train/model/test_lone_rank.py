"""A lone rank without FSDP: the same bits as with it, and each goes on from the other's snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from engines.train import fsdp_engine
from engines.train.fsdp_engine import FSDPEngine
from tests.engines.train.conftest import Make
from tests.engines.train.model.test_master_weights import MULTIPLIED, ROUNDED, update
from tests.engines.train.model.test_remainders import REMAINDERS


@pytest.fixture
def pair(make: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[FSDPEngine, FSDPEngine]:
    """One by FSDP with float32 weights, and a plain one as it is on a GPU."""
    sharded = make(run="sharded", **MULTIPLIED)
    monkeypatch.setattr(fsdp_engine, "WHOLE", ("cpu",))
    plain = make(run="plain", **MULTIPLIED)
    assert isinstance(sharded._loaded(), FSDPModule)
    assert not isinstance(plain._loaded(), FSDPModule)
    return sharded, plain


def test_updates_versions_and_snapshots_are_the_same_to_the_bit(
    tmp_path: Path, pair: tuple[FSDPEngine, FSDPEngine]
) -> None:
    sharded, plain = pair
    assert plain.digest() == sharded.digest()
    assert update(plain, tmp_path, 1) == update(sharded, tmp_path, 1)
    for number, dtype in enumerate(("float32", "bfloat16"), 1):
        theirs, ours = (one.export_weights(number, dtype) for one in pair)
        assert theirs.digest == ours.digest
        assert plain.compare(theirs, dtype).differing == ()
    plain.save_state(1)
    sharded.save_state(1)
    after = update(plain, tmp_path, 2)
    sharded.load_state(1, run="plain")
    assert update(sharded, tmp_path, 2) == after
    plain.load_state(1, run="sharded")
    assert update(plain, tmp_path, 2) == after
    tokens = [[5, 6, 7, 8, 9], [4, 3, 2]]
    assert plain.score(tokens, [2, 1]) == sharded.score(tokens, [2, 1])


def test_gradients_are_summed_in_float32_beside_bfloat16_weights(
    tmp_path: Path, pair: tuple[FSDPEngine, FSDPEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plain = pair
    assert {one.dtype for one in plain._loaded().parameters()} == {torch.bfloat16}
    masters = plain._masters.tensors
    assert masters and {one.dtype for one in masters} == {torch.float32}
    update(plain, tmp_path, 1)
    for parameter in plain._loaded().parameters():
        rounded = plain._masters.of(parameter).to(torch.bfloat16)
        assert torch.equal(rounded, parameter)


def test_it_goes_away_and_comes_back_with_its_masters(
    tmp_path: Path, pair: tuple[FSDPEngine, FSDPEngine]
) -> None:
    _, plain = pair
    before = update(plain, tmp_path, 1)
    moved = plain.offload()
    sizes = sum(one.nbytes for one in plain._masters.tensors)
    assert moved.nbytes > sizes
    plain.onload()
    assert plain.digest() == before


@pytest.mark.parametrize("settings", [{"compute_dtype": "float32"}, ROUNDED, REMAINDERS])
def test_other_formats_too(
    tmp_path: Path, make: Make, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded = make(run="sharded", **{"micro_batch_tokens": 64, **settings})
    monkeypatch.setattr(fsdp_engine, "WHOLE", ("cpu",))
    plain = make(run="plain", **{"micro_batch_tokens": 64, **settings})
    assert update(plain, tmp_path, 1) == update(sharded, tmp_path, 1)
