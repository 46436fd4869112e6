"""Compiled layers: the same numbers but for rounding, few graphs, nothing else that shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.algorithm.algorithm import AlgorithmConfig
from configs.lora import LoraConfig
from engines.train.contract import LogprobRequest
from engines.train.fsdp_engine import FSDPEngine
from engines.train.model import compiled
from engines.train.model.compiled import lacking
from engines.train.model.fsdp import gather
from storage.batches.refs import BatchRef
from storage.objects.store import Store
from storage.runs.weights import open_manifest
from tests.engines.train.train_ranks import (
    TEMPERATURE,
    Ranks,
    samples,
    spec,
    stored,
    update_of,
)

UPDATES = 3
TRACED = "eager"  # traced and guarded as for Inductor, then computed piece by piece as ever
GRAPHS = 4  # of a layer: before attention's block, before, after attention itself, after the block
PASS = ("old_logprobs",)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What rank 0 found after some updates."""

    state: dict[str, torch.Tensor]  # weights and AdamW's moments
    norms: list[float]  # of the gradient, by update
    logprobs: list[float]  # mean by update, before it
    names: list[str]  # of the tensors of the version that was published
    graphs: list[int]  # that torch had made, after each update


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def batches(folder: Path) -> list[BatchRef]:
    """Groups of other numbers and sizes in each."""
    return [
        stored(folder, samples(seed, groups=2 + seed), f"batch-{seed}") for seed in range(UPDATES)
    ]


def train(
    rank: int,
    world: int,
    ports: list[int],
    folder: Path,
    batches: list[BatchRef],
    name: str,
    backend: str | None,
    passes: tuple[str, ...] = PASS,
    lora: LoraConfig | None = None,
    **settings: Any,
) -> Seen:
    """Updates of many micro-batches, with passes before each; backend None: not compiled."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled.BACKEND = backend or "inductor"
    made = spec(folder, run=f"{name}-{world}", micro_batch_tokens=64, compile=backend is not None)
    made = made.model_copy(
        update={"lora": lora, "train": made.train.model_copy(update=dict(settings))}
    )
    engine = FSDPEngine(made)
    engine.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)
    norms, logprobs, graphs = [], [], []
    for step, batch in enumerate(batches, 1):
        for column in passes:
            key = f"run/{name}-{world}-{column}-{rank}-{step}.safetensors"
            found = engine.logprobs(
                LogprobRequest(batch=batch, column=column, out_key=key, temperature=TEMPERATURE)
            ).metrics
            if column in found:  # of ranks that share sequences one counts
                logprobs.append(found[column] / found["tokens"])
        updated = engine.update(update_of(batch, AlgorithmConfig(), step))
        norms.append(updated.metrics["train/grad_norm"])
        graphs.append(counters["stats"]["unique_graphs"])
    version = engine.export_weights(UPDATES, "float32")
    group = engine._joined().group
    whole = {name: gather(each, None, 0, group) for name, each in engine._state().items()}
    seen = Seen(
        state={n: one.clone() for n, one in whole.items() if one is not None},
        norms=norms,
        logprobs=logprobs,
        names=list(open_manifest(Store(str(folder / "store")), version).tensors),
        graphs=graphs,
    )
    engine.leave()
    return seen


def farthest(one: Seen, other: Seen, kind: str) -> float:
    """The largest difference between two states' tensors of a kind."""
    names = [name for name in one.state if name.startswith(f"{kind}.")]
    return max(float((one.state[n] - other.state[n]).abs().max()) for n in names)


def assert_alike(plain: Seen, seen: Seen) -> None:
    """To float32's rounding, 2^-23 = 1.2e-7 of a number: sums of some hundred in another order are
    1e-5 of their size apart at most. AdamW's first moment is a sum of gradients, of which the largest
    are about 1 here. A weight may be 1e-3 off: AdamW divides a gradient by its own size, so where it
    is all but 0 rounding decides on a share of the step, which is 1e-2."""
    assert seen.logprobs == pytest.approx(plain.logprobs, rel=1e-5)
    assert seen.norms == pytest.approx(plain.norms, rel=1e-5)
    assert farthest(plain, seen, "exp_avg") <= 1e-5
    assert farthest(plain, seen, "model") <= 1e-3
    assert seen.state.keys() == plain.state.keys()
    assert seen.names == plain.names


def assert_equal(plain: Seen, seen: Seen) -> None:
    """To the bit."""
    assert (seen.logprobs, seen.norms, seen.names) == (plain.logprobs, plain.norms, plain.names)
    assert seen.state.keys() == plain.state.keys()
    assert all(torch.equal(seen.state[name], plain.state[name]) for name in plain.state)


@pytest.fixture(scope="module")
def alone(folder: Path, batches: list[BatchRef]) -> Iterator[Any]:
    """Trains in this process."""
    before = compiled.BACKEND

    def run(name: str, backend: str | None, **settings: Any) -> Seen:
        return train(0, 1, [0], folder, batches, name, backend, **settings)

    yield run
    compiled.BACKEND = before
    torch._dynamo.reset()


def test_all_sizes_and_layers_share_four_graphs(alone: Any) -> None:
    """Traced, and then the same operations as ever: the same bits, in a quarter of the time."""
    plain, seen = alone("plain", None, passes=()), alone("traced", TRACED, passes=())
    assert_equal(plain, seen)
    assert plain.graphs == [0] * UPDATES
    assert seen.graphs == [GRAPHS] * UPDATES
    assert "model.layers.0.self_attn.q_proj.weight" in seen.names


@pytest.mark.slow
def test_adapters_and_checkpointed_layers_have_their_own_graphs(alone: Any) -> None:
    """The base alone is not computed with the adapters' graph."""
    given: dict[str, Any] = {
        "passes": ("ref_logprobs", *PASS),
        "lora": LoraConfig(rank=4, alpha=8),
        "gradient_checkpointing": 0.5,
    }
    plain, seen = alone("lora", None, **given), alone("lora-traced", TRACED, **given)
    assert_equal(plain, seen)
    assert plain.logprobs[-1] != plain.logprobs[-2], "the adapters have changed something"
    assert seen.graphs == [seen.graphs[0]] * UPDATES
    assert (
        3 * GRAPHS <= seen.graphs[0] <= 5 * GRAPHS
    )  # of gradients, of the base, without gradients


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": 0.5}], ids=["", "again"])
def test_compiled_layers_train_alike(alone: Any, settings: dict[str, Any]) -> None:
    plain, seen = alone("plain", None, **settings), alone("compiled", "inductor", **settings)
    assert_alike(plain, seen)
    assert farthest(plain, seen, "exp_avg") > 0, "it was compiled"
    assert seen.graphs == [seen.graphs[0]] * UPDATES


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["fsdp", "sequences"])
def test_two_ranks_compile_alike(folder: Path, batches: list[BatchRef], shared: bool) -> None:
    """FSDP gathers around compiled layers, and ranks that share sequences exchange heads in them."""
    pair, given = Ranks(2), (folder, batches)
    work = partial(train, sequence_parallel=2, gradient_checkpointing=0.5) if shared else train
    try:
        plain = pair.run(work, *given, f"pair-{shared}", None)[0]
        seen = pair.run(work, *given, f"pair-compiled-{shared}", "inductor")[0]
    finally:
        pair.close()
    assert_alike(plain, seen)
    assert seen.graphs[1:] == seen.graphs[:1] * (UPDATES - 1)


def test_what_is_lacking_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert lacking(gpu=False) == (
        "TORCHDYNAMO_DISABLE=1 keeps torch from it. Unset TORCHDYNAMO_DISABLE"
    )
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert lacking(gpu=False) == (
        "there is no C++ compiler (no-such-compiler) here. Install one (apt install g++)"
    )
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    assert str(lacking(gpu=True)).startswith("triton is not installed.")
