"""Adapters over two ranks, whose rows of the factors are uneven: as on one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig

from benchmarks.families import FAMILIES
from configs.model import PretrainedModel
from engines.models.checkpoints import character_tokenizer, save
from engines.train.contract import ColumnsResult, LogprobRequest, TrainSpec, UpdateResult
from engines.train.fsdp_engine import FSDPEngine
from engines.train.self_test.twin import build
from storage.batches.refs import BatchRef
from storage.objects.store import Store
from storage.runs.weights import WeightsRef, stream
from tests.engines.train.model.test_lora import LORA, PLAIN, lora_spec
from tests.engines.train.train_ranks import (
    TEMPERATURE,
    Ranks,
    samples,
    stored,
    update_of,
)
from tests.ports import free_ports


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank did."""

    updates: list[UpdateResult]
    versions: list[WeightsRef]
    digests: list[str]  # fresh, saved, gone on, fresh again, restored, gone on again
    published: str  # digest of the last version, as the engine computes it
    reference: ColumnsResult


def scenario(
    rank: int, world: int, ports: list[int], given: TrainSpec, batches: list[BatchRef]
) -> Seen:
    engine = FSDPEngine(given.model_copy(update={"run": f"of-{world}"}))

    def join(generation: int) -> None:
        engine.join(rank, world, "127.0.0.1", ports[generation], generation, 60.0)

    def update(step: int) -> UpdateResult:
        return engine.update(update_of(batches[step - 1], PLAIN, step))

    join(0)
    digests, versions = [engine.digest()], [engine.export_weights(0, "float32")]
    updates = [update(1), update(2)]
    versions.append(engine.export_weights(2, "float32"))
    published = engine.digest("float32")
    engine.save_state(2)
    digests.append(engine.digest())
    update(3)
    digests.append(engine.digest())
    join(1)
    digests.append(engine.digest())
    engine.load_state(2)
    digests.append(engine.digest())
    update(3)
    digests.append(engine.digest())
    reference = engine.logprobs(
        LogprobRequest(
            batch=batches[0],
            column="ref_logprobs",
            out_key="ref.safetensors",
            temperature=TEMPERATURE,
        )
    )
    return Seen(
        updates=updates,
        versions=versions,
        digests=digests,
        published=published,
        reference=reference,
    )


@pytest.fixture(scope="module", params=["dense", "experts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(f"lora-ranks-{request.param}")


@pytest.fixture(scope="module")
def seen(folder: Path) -> Iterator[dict[int, list[Seen]]]:
    """The scenario on one rank and on two."""
    given = lora_spec(folder, micro_batch_tokens=64)
    if "experts" in folder.name:
        _, sizes = FAMILIES["Qwen3-MoE"]
        config = Qwen3MoeConfig(**{**sizes, "num_hidden_layers": 2, "num_experts": 3})
        save(build(config), folder / "model")
        character_tokenizer().save_pretrained(folder / "model")
        model = PretrainedModel(path=str(folder / "model"))
        lora = LORA.model_copy(update={"target_parameters": "all-experts"})
        given = given.model_copy(update={"model": model, "lora": lora})
    batches = [stored(folder, samples(seed, groups=5), f"batch-{seed}") for seed in range(3)]
    pair = Ranks(2)
    yield {
        1: [scenario(0, 1, free_ports(4), given, batches)],
        2: pair.run(scenario, given, batches),
    }
    pair.close()


def test_two_ranks_learn_what_one_does(seen: dict[int, list[Seen]], folder: Path) -> None:
    store = Store(str(folder / "store"))
    alone, together = (dict(stream(store, seen[world][0].versions[1])) for world in (1, 2))
    assert alone.keys() == together.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, atol=2e-3, rtol=0, msg=name)
        assert (together[name] - tensor).abs().median() < 1e-5, name
    for one, two in zip(seen[1][0].updates, seen[2][0].updates, strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert two.metrics[f"train/{name}"] == pytest.approx(
                one.metrics[f"train/{name}"], rel=1e-4, abs=1e-6
            ), name


def test_fresh_adapters_have_one_digest_whatever_the_ranks(seen: dict[int, list[Seen]]) -> None:
    assert seen[1][0].digests[0] == seen[2][0].digests[0]
    assert seen[1][0].versions[0].digest == seen[2][0].versions[0].digest


def test_ranks_agree(seen: dict[int, list[Seen]]) -> None:
    first, second = seen[2]
    assert first.digests == second.digests and first.versions == second.versions


@pytest.mark.parametrize("world", [1, 2])
def test_state_comes_back_to_the_bit(seen: dict[int, list[Seen]], world: int) -> None:
    fresh, saved, on, again, restored, on_again = seen[world][0].digests
    assert (again, restored, on_again) == (fresh, saved, on)
    assert len({fresh, saved, on}) == 3
    assert seen[world][0].published == seen[world][0].versions[1].digest


def test_the_reference_of_both_is_the_same(seen: dict[int, list[Seen]], folder: Path) -> None:
    store, found = Store(str(folder / "store")), []
    for parts in seen.values():
        whole = ColumnsResult.together([part.reference for part in parts])
        assert whole.batch is not None
        found.append(whole.batch.fetch_numpy(store, "ref_logprobs")[0])
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)
