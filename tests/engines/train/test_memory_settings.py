"""Settings that change what a train rank holds, and not what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from configs.algorithm.algorithm import AlgorithmConfig
from configs.train import TrainConfig
from engines.train.batching.packed_batch import pack
from engines.train.contract import LogprobRequest, TeachRequest
from engines.train.fsdp_engine import FSDPEngine
from engines.train.memory import OTHERS, PASS, setting_for_less
from engines.train.memory_plan import checkpointed
from engines.train.model.fsdp import gather, layers
from engines.train.model.master_weights import base_weights
from engines.train.optimizer import stochastically_rounded
from storage.batches.refs import BatchRef
from storage.objects.store import Store
from tests.engines.train.train_ranks import (
    TEMPERATURE,
    Ranks,
    samples,
    spec,
    stored,
    update_of,
)
from tests.ports import free_ports

SAME = {  # to the bit
    "one layer of two checkpointed": {"gradient_checkpointing": 0.5},
    "checkpointed": {"gradient_checkpointing": True},
    "off-loaded": {"activation_offload": True},
    "both": {"gradient_checkpointing": True, "activation_offload": True},
    "not resharded": {"reshard_after_forward": False},
    "moments on the host": {"optimizer_device": "host"},
}
ROUNDED = {  # to the bit too, where products are made in bfloat16
    "in bfloat16": {},
    "and moments on the host": {"optimizer_device": "host"},
    "checkpointed and off-loaded": {"gradient_checkpointing": True, "activation_offload": True},
    "not resharded": {"reshard_after_forward": False},
    "two copies": {"replicas": 2},
    "reduced once": {"reduce_gradients": "optimizer_step"},
    "in remainders": {"master_weights": "remainder"},
}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What rank 0 found after two updates."""

    digest: str
    again: str  # after going back to the snapshot between them
    weights: dict[str, np.ndarray]
    reductions: int  # reduce-scatters of the second update
    gathered: bool  # whether a layer's weights stay whole after its forward pass


def train(
    rank: int,
    world: int,
    ports: list[int],
    folder: Path,
    batches: list[BatchRef],
    name: str,
    settings: dict[str, Any],
) -> Seen:
    """Two updates, an optimizer step of several micro-batches each."""
    engine = FSDPEngine(spec(folder, run=f"{name}-{world}", micro_batch_tokens=64, **settings))
    engine.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)

    def update(step: int) -> str:
        batch = batches[step - 1]
        engine.update(update_of(batch, AlgorithmConfig(), step))
        return engine.digest()

    update(1)
    engine.save_state(1)
    with mock.patch.object(dist, "reduce_scatter_single", wraps=dist.reduce_scatter_single) as sent:
        digest = update(2)
    group = engine._joined().group
    held = base_weights(engine._loaded().model, engine._masters)
    whole = {name: gather(each, None, 0, group) for name, each in held.items()}
    weights = {name: one.numpy().copy() for name, one in whole.items() if one is not None}
    engine.load_state(1)
    again = update(2)
    engine._forward(1.0)(pack([np.arange(4, 9)], [np.arange(9, 14)]))
    first = next(layers(engine._loaded())[0].parameters())
    engine.leave()
    return Seen(
        digest=digest,
        again=again,
        weights=weights,
        reductions=sent.call_count,
        gathered=not isinstance(first, DTensor),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def batches(folder: Path) -> list[BatchRef]:
    return [stored(folder, samples(seed), f"batch-{seed}") for seed in range(2)]


class Settings:
    """Trains under settings, on a number of ranks that stays."""

    def __init__(self, world: int, folder: Path, batches: list[BatchRef]) -> None:
        self.ranks = Ranks(world)
        self._given = (folder, batches)

    def seen(self, name: str, **settings: Any) -> Seen:
        found: list[Seen] = self.ranks.run(train, *self._given, name.replace(" ", "-"), settings)
        return found[0]


@pytest.fixture(scope="module")
def pair(folder: Path, batches: list[BatchRef]) -> Iterator[Settings]:
    pair = Settings(2, folder, batches)
    yield pair
    pair.ranks.close()


@pytest.fixture(scope="module")
def plain(pair: Settings) -> Seen:
    return pair.seen("plain")


def farthest(one: Seen, other: Seen) -> float:
    """The largest difference between two models' weights."""
    assert one.weights.keys() == other.weights.keys()
    return max(float(np.abs(one.weights[n] - other.weights[n]).max()) for n in one.weights)


@pytest.mark.parametrize("name", SAME)
def test_the_weights_are_the_same_to_the_bit(pair: Settings, plain: Seen, name: str) -> None:
    seen = pair.seen(name, **SAME[name])
    assert seen.digest == seen.again == plain.digest == plain.again
    assert seen.gathered == (name == "not resharded")


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_weights_with_masters_are_trained_the_same_to_the_bit(
    pair: Settings, name: str
) -> None:
    others = {"compute_dtype": "bfloat16", **ROUNDED[name]}
    if name in ("two copies", "reduced once"):  # sums in another order than without it
        plain = pair.seen(f"float32 {name}", **others)
    else:
        plain = pair.seen("float32 in products", compute_dtype="bfloat16")
    seen = pair.seen(f"rounded {name}", weights_dtype="bfloat16", **others)
    assert seen.digest == seen.again == plain.digest == plain.again


def test_gradients_can_be_reduced_once_for_an_optimizer_step(pair: Settings, plain: Seen) -> None:
    seen = pair.seen("once", reduce_gradients="optimizer_step")
    assert seen.reductions == 3  # units of the model: two layers and the rest
    assert plain.reductions > seen.reductions
    assert 0 < farthest(seen, plain) < 1e-4  # after two steps of 1e-2: sums in another order
    assert seen.digest == seen.again


# Two steps of 1e-2, each by a tenth at most, or by a quarter: codes of what is small are coarse.
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 2e-3), ("8bit", 5e-3)])
def test_moments_in_fewer_bits_train_alike_and_go_on_from_a_snapshot(
    pair: Settings, plain: Seen, dtype: str, most: float
) -> None:
    seen = pair.seen(dtype, optimizer_dtype=dtype, optimizer_device="host")
    assert seen.digest == seen.again
    assert 0 < farthest(seen, plain) < most


def scored(
    rank: int, world: int, ports: list[int], folder: Path, batch: BatchRef
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """A rank's log-probs in bfloat16 by a policy and by frozen models, and bytes of weights."""
    store, found, held = Store(str(folder / "store")), {}, {}
    for role, port in zip(("actor", "ref", "teacher"), ports, strict=False):
        given = spec(folder, run=f"frozen-{world}", role=role, compute_dtype="bfloat16")
        if role == "teacher":
            given = given.model_copy(update={"student": given.model, "name": "t"})
        engine = FSDPEngine(given)
        engine.join(rank, world, "127.0.0.1", port, 1, 60.0)
        key = f"run/{role}-{world}.safetensors"
        if role == "teacher":
            made, column = (
                engine.teach(
                    TeachRequest(batch=batch, out_key=key, temperature=TEMPERATURE, top_k=3)
                ).batch,
                "teacher_logprobs",
            )
        else:
            column = "old_logprobs" if role == "actor" else "ref_logprobs"
            made = engine.logprobs(
                LogprobRequest(batch=batch, column=column, out_key=key, temperature=TEMPERATURE)
            ).batch  # type: ignore[arg-type]
        assert made is not None
        found[role] = made.fetch_numpy(store, column)[0]
        held[role] = engine.memory_held("host")["weights"]
        engine.leave()
    return found, held


def test_frozen_models_are_held_as_they_are_multiplied_with_the_same_log_probs(
    pair: Settings, folder: Path, batches: list[BatchRef]
) -> None:
    alone = scored(0, 1, free_ports(3), folder, batches[0])
    for found, held in (alone, *pair.ranks.run(scored, folder, batches[0])):
        assert held["ref"] == held["teacher"] == held["actor"] // 2
        assert np.array_equal(found["ref"], found["actor"])
        assert np.array_equal(found["teacher"], found["actor"])


@pytest.mark.slow
def test_two_copies_of_two_ranks_train_like_one_and_four(
    folder: Path, batches: list[BatchRef], plain: Seen
) -> None:
    four = Settings(4, folder, batches)
    try:
        sharded = four.seen("sharded")
        copies = four.seen("copies", replicas=2)
        whole = four.seen("whole", replicas=4)
    finally:
        four.ranks.close()
    for seen in (sharded, copies, whole):
        assert seen.digest == seen.again
        assert farthest(seen, plain) < 1e-4
    assert not copies.gathered
    assert whole.gathered


@pytest.mark.parametrize(("share", "twice"), [(0, 0), (0.5, 1), (1, 2)])
def test_so_many_layers_are_computed_twice(tmp_path: Path, share: float, twice: int) -> None:
    engine = FSDPEngine(spec(tmp_path, gradient_checkpointing=share))
    engine.join(0, 1, "127.0.0.1", 0, 1, 60.0)
    calls = [0, 0]
    for number, layer in enumerate(layers(engine._loaded())):
        attention = layer.self_attn

        def count(*_: object, number: int = number) -> None:
            calls[number] += 1

        attention.register_forward_hook(count)
    batch = stored(tmp_path, samples())
    engine.update(update_of(batch, AlgorithmConfig(), 1))
    engine.leave()
    assert calls == [2] * twice + [1] * (2 - twice)


@pytest.mark.parametrize(
    ("share", "layers", "found"), [(0, 30, 0), (0.1, 30, 3), (0.11, 30, 4), (1, 30, 30)]
)
def test_a_share_of_layers_is_rounded_up(share: float, layers: int, found: int) -> None:
    assert checkpointed(share, layers) == found


@pytest.mark.parametrize(("stored", "share"), [(True, 1.0), (False, 0.0), (0.25, 0.25)])
def test_runs_stored_with_a_switch_for_checkpointing_are_read(stored: object, share: float) -> None:
    read = TrainConfig.model_validate_json(
        TrainConfig().model_copy(update={"gradient_checkpointing": stored}).model_dump_json()
    )
    assert read.gradient_checkpointing == share


def test_stochastic_rounding_keeps_the_mean_and_takes_a_neighbour() -> None:
    torch.manual_seed(0)
    low, high = 1.0, 1.0 + 2.0**-7  # neighbours in bfloat16
    value = low + 0.3 * (high - low)
    for sign in (1.0, -1.0):
        rounded = stochastically_rounded(torch.full((20_000,), sign * value)).float() * sign
        assert set(rounded.unique().tolist()) == {low, high}
        share = float((rounded == high).double().mean())
        assert share == pytest.approx(0.3, abs=0.02)  # six standard deviations
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf")])
    assert torch.equal(stochastically_rounded(exact).float(), exact)


def test_stochastic_rounding_lets_a_second_moment_fall() -> None:
    torch.manual_seed(0)
    kept = torch.ones(1000, dtype=torch.bfloat16)
    nearest = kept.clone()
    for _ in range(500):
        kept = stochastically_rounded(kept.float() * 0.999)
        nearest = (nearest.float() * 0.999).bfloat16()
    assert float(nearest.float().mean()) == 1.0  # it never moved
    assert float(kept.float().mean()) == pytest.approx(0.999**500, rel=0.02)


def test_the_setting_that_is_named_is_that_of_the_largest_holder() -> None:
    held = {"weights": 1, "gradients": 1, "optimizer": 2, PASS: 9, OTHERS: 3}
    train = TrainConfig()
    assert "gradient_checkpointing = true" in setting_for_less(train, "device", held)
    again = train.model_copy(update={"gradient_checkpointing": 1.0})
    assert "lower than 8192" in setting_for_less(again, "device", held)
    assert "optimizer_device = host" in setting_for_less(train, "device", {**held, "optimizer": 10})
    assert "workers" in setting_for_less(train, "host", {**held, "optimizer": 10})
    assert "workers" in setting_for_less(train, "device", {**held, "weights": 10})
    assert "pool of its own" in setting_for_less(train, "device", {**held, OTHERS: 10})
