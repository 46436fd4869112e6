"""Weights in bfloat16 with float32 masters: versions and snapshots are those of float32 weights.

That updates on several ranks are, too, is in test_memory_settings.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from configs.algorithm.algorithm import AlgorithmConfig
from configs.lora import LoraConfig
from configs.train import TrainConfig
from engines.train import fsdp_engine
from engines.train.fsdp_engine import FSDPEngine
from engines.train.memory import setting_for_less
from tests.engines.train.conftest import Join, Make
from tests.engines.train.train_ranks import (
    samples,
    spec,
    stored,
    update_of,
)

MULTIPLIED = {"compute_dtype": "bfloat16", "micro_batch_tokens": 64}
ROUNDED = {**MULTIPLIED, "weights_dtype": "bfloat16"}


def update(engine: FSDPEngine, folder: Path, step: int) -> str:
    """Digest after an update of several micro-batches."""
    batch = stored(folder, samples(step), f"batch-{step}")
    engine.update(update_of(batch, AlgorithmConfig(), step))
    return engine.digest()


@pytest.mark.parametrize("masters", ["float32", "remainder"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_versions_and_snapshots_are_those_of_float32_weights(
    tmp_path: Path, join: Join, lora: LoraConfig | None, masters: str
) -> None:
    settings = {"whole": MULTIPLIED, "rounded": {**ROUNDED, "master_weights": masters}}
    whole, rounded = (
        join(spec(tmp_path, run=run, **given).model_copy(update={"lora": lora}))
        for run, given in settings.items()
    )
    assert whole.digest() == rounded.digest()  # as loaded
    assert update(whole, tmp_path, 1) == update(rounded, tmp_path, 1)
    for number, dtype in enumerate(("float32", "bfloat16"), 1):
        theirs, ours = (one.export_weights(number, dtype) for one in (whole, rounded))
        assert theirs.digest == ours.digest
        assert rounded.compare(theirs, dtype).differing == ()
    base = [one for one in rounded._loaded().parameters() if not one.requires_grad]
    held = base or list(rounded._loaded().parameters())
    assert {one.dtype for one in held} == {torch.bfloat16}

    rounded.save_state(1)
    whole.save_state(1)
    after = update(rounded, tmp_path, 2)
    whole.load_state(1, run="rounded")
    assert update(whole, tmp_path, 2) == after
    rounded.load_state(1, run="whole")
    assert update(rounded, tmp_path, 2) == after


@pytest.mark.parametrize("masters", ["float32", "remainder"])
def test_a_version_is_taken_with_all_its_digits(tmp_path: Path, make: Make, masters: str) -> None:
    whole = make(run="whole", **MULTIPLIED)
    rounded = make(run="rounded", master_weights=masters, **ROUNDED)
    wanted = update(whole, tmp_path, 1)
    rounded.load_weights(whole.export_weights(1, "float32"), 1)
    assert rounded.digest() == wanted
    tokens = [[5, 6, 7, 8, 9]]
    assert rounded.score(tokens, [2]) == whole.score(tokens, [2])


def test_sums_in_another_format_are_noticed(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp_engine, "sum_gradients_in_float32", lambda module: None)
    engine = make(**ROUNDED)
    with pytest.raises(AssertionError, match=r"of model\.\S+ was summed in torch\.bfloat16"):
        update(engine, tmp_path, 1)


def test_it_is_what_is_proposed_for_weights_that_a_device_cannot_hold() -> None:
    held, train = {"weights": 2, "gradients": 1}, TrainConfig()
    assert "weights_dtype = bfloat16" in setting_for_less(train, "device", held)
    there = train.model_copy(update={"weights_dtype": "bfloat16"})
    for given in (
        setting_for_less(there, "device", held),
        setting_for_less(train, "host", held),
        setting_for_less(train, "device", held, frozen=True),
    ):
        assert "weights_dtype" not in given
        assert "workers" in given


def test_remainders_are_proposed_for_masters_that_do_not_fit() -> None:
    held, train = {"master weights": 4, "weights": 2}, TrainConfig()
    said = "Set train.weights_dtype = bfloat16 and train.master_weights = remainder"
    for memory in ("device", "host"):
        assert said in setting_for_less(train, memory, held)
    halves = train.model_copy(update={"master_weights": "remainder"})
    assert "master_weights" not in setting_for_less(halves, "device", held)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"compute_dtype": "float32"}, "train.weights_dtype = float32 or train.compute_dtype"),
        ({"engine": "elastic"}, "Set train.weights_dtype = float32"),
    ],
)
def test_what_does_not_go_with_it_is_refused(given: dict[str, str], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        TrainConfig.model_validate({"weights_dtype": "bfloat16", **given})
