"""Adapters in the train engine: against merged weights, against no adapter, published, restored."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from configs.algorithm.algorithm import AlgorithmConfig
from configs.lora import LoraConfig
from engines.failures import WeightMismatch
from engines.models.adapters import stream_whole
from engines.models.checkpoints import materialize
from engines.train.contract import ColumnsResult, LogprobRequest, TrainSpec
from engines.train.fsdp_engine import FSDPEngine
from engines.train.model.lora import adapted_layers, reset
from storage.batches.refs import BatchRef
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from storage.runs.weights import BaseVersion, WeightsRef, open_manifest, stream
from tests.engines.train import naive_training as naive
from tests.engines.train.conftest import Join, Make
from tests.engines.train.train_ranks import (
    MODEL,
    TEMPERATURE,
    samples,
    spec,
    stored,
    update_of,
)

LORA = LoraConfig(rank=3, alpha=6.0)
PLAIN = AlgorithmConfig()
ADAPTED = 2 * 7  # layers x linear layers of each


def lora_spec(folder: Path, lora: LoraConfig = LORA, **settings: object) -> TrainSpec:
    return spec(folder, **settings).model_copy(update={"lora": lora})


@pytest.fixture
def make(tmp_path: Path, join: Join) -> Make:
    """Makes an engine with adapters, of these settings if any are given."""
    return lambda given=None: join(given or lora_spec(tmp_path))


def update(engine: FSDPEngine, batch: BatchRef, step: int = 1) -> dict[str, float]:
    result = engine.update(update_of(batch, PLAIN, step))
    return dict(result.metrics)


def logprobs(engine: FSDPEngine, folder: Path, batch: BatchRef, column: str) -> np.ndarray:
    key = f"run/{column}-{np.random.default_rng().integers(2**40)}.safetensors"
    result = engine.logprobs(
        LogprobRequest(batch=batch, column=column, out_key=key, temperature=TEMPERATURE)
    )
    assert isinstance(result, ColumnsResult) and result.batch is not None
    return result.batch.fetch_numpy(Store(str(folder / "store")), column)[0]


class Merged(nn.Module):
    """The reference: a weight that is W + s B A, whose gradients torch finds by itself."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a.clone()), nn.Parameter(b.clone())

    def forward(self, weight: Tensor) -> Tensor:
        return weight + LORA.alpha / LORA.rank * self.b @ self.a


def naive_model(folder: Path, factors: dict[str, Tensor]) -> nn.Module:
    """Plain transformers with merged weights, of which only the factors are trained."""
    model = naive.load(str(materialize(MODEL, folder / "models"))).requires_grad_(False)
    for name, tensor in factors.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            merged = Merged(tensor, factors[name.replace(".lora_A.", ".lora_B.")])
            parametrize.register_parametrization(model.get_submodule(module), "weight", merged)
    return model


def published(folder: Path, ref: WeightsRef | BaseVersion) -> dict[str, Tensor]:
    return dict(stream(Store(str(folder / "store")), ref))


def test_a_fresh_adapter_changes_nothing(make: Make, tmp_path: Path) -> None:
    rows = [[4, 5, 6, 7, 8, 9], [9, 8, 7]]
    assert make().score(rows, [2, 1]) == make(spec(tmp_path)).score(rows, [2, 1])


def test_updates_equal_those_of_merged_weights(make: Make, tmp_path: Path) -> None:
    """Loss, norm and both factors of every layer, over two steps, from a start where B is not 0."""
    engine, rows = make(), samples()
    batch = stored(tmp_path, rows)
    update(engine, batch)
    factors = published(tmp_path, engine.export_weights(1, "float32"))
    assert len(factors) == 2 * ADAPTED
    model = naive_model(tmp_path, factors)
    with torch.no_grad():
        wanted = torch.cat(naive.logprobs(model, rows, TEMPERATURE)).numpy()
    got = logprobs(engine, tmp_path, batch, "old_logprobs")
    np.testing.assert_allclose(got, wanted, atol=2e-5)
    trained = [each for each in model.parameters() if each.requires_grad]
    assert len(trained) == 2 * ADAPTED
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0)
    settings = {"temperature": TEMPERATURE, "max_grad_norm": 1.0}
    loss, norm = naive.grpo_step(model, optimizer, rows, **settings)
    fresh = make()  # with AdamW's moments at 0, as the naive optimizer has them
    with torch.no_grad():
        for name, layer in adapted_layers(fresh._loaded().model):
            layer.lora_A.to_local().copy_(factors[f"base_model.model.{name}.lora_A.weight"])
            layer.lora_B.to_local().copy_(factors[f"base_model.model.{name}.lora_B.weight"])
    metrics = update(fresh, batch, 2)
    assert metrics["train/loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, layer in adapted_layers(fresh._loaded().model):
        wanted_module = model.get_submodule(name).parametrizations.weight[0]
        for mine, theirs in ((layer.lora_A, wanted_module.a), (layer.lora_B, wanted_module.b)):
            gap = (mine.to_local() - theirs).abs()
            assert (gap > 1e-4).float().mean() <= 0.01 and gap.max() <= 2e-3, name


def test_the_merged_version_is_what_the_engine_computes(make: Make, tmp_path: Path) -> None:
    engine, rows = make(), samples()
    batch = stored(tmp_path, rows)
    for step in (1, 2, 3):
        update(engine, batch, step)
    ref = engine.export_weights(3, "float32")
    model = naive.load(str(materialize(MODEL, tmp_path / "models")))
    model.load_state_dict(dict(stream_whole(Store(str(tmp_path / "store")), ref)))
    with torch.no_grad():
        merged = torch.cat(naive.logprobs(model, rows, TEMPERATURE)).numpy()
    unmerged = logprobs(engine, tmp_path, batch, "old_logprobs")
    np.testing.assert_allclose(unmerged, merged, atol=2e-5)
    base = logprobs(engine, tmp_path, batch, "ref_logprobs")
    assert np.abs(base - unmerged).max() > 0.1  # so that the steps above have changed something


def test_the_reference_is_the_base_to_the_bit(make: Make, tmp_path: Path) -> None:
    engine, batch = make(), stored(tmp_path, samples())
    update(engine, batch)
    mine = logprobs(engine, tmp_path, batch, "ref_logprobs")
    reference = make(spec(tmp_path, role="ref"))
    assert mine.tolist() == logprobs(reference, tmp_path, batch, "ref_logprobs").tolist()
    assert mine.tolist() != logprobs(engine, tmp_path, batch, "old_logprobs").tolist()


def test_versions_share_a_base_and_are_small(make: Make, tmp_path: Path) -> None:
    engine, store = make(), Store(str(tmp_path / "store"))
    refs = [engine.export_weights(0, "bfloat16")]
    update(engine, stored(tmp_path, samples()))
    refs.append(engine.export_weights(1, "bfloat16"))
    bases = [ref.base for ref in refs]
    assert (
        bases[0] is not None
        and bases[0] == bases[1]
        and bases[0].key == "run/weights/base-bfloat16"
    )
    width, inner = 64, 128
    linear = 4 * (width + width) + 2 * (width + inner) + (inner + width)
    assert refs[1].nbytes == 2 * linear * LORA.rank * 4
    assert {str(each.dtype) for each in published(tmp_path, refs[1]).values()} == {"torch.float32"}
    base = published(tmp_path, bases[0])
    wanted = naive.load(str(materialize(MODEL, tmp_path / "models"))).state_dict()
    assert base.keys() == wanted.keys()
    for name, tensor in base.items():
        assert torch.equal(tensor, wanted[name].bfloat16()), name
    config = json.loads(store.read(f"{refs[1].key}/adapter_config.json"))
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (3, 6.0, 0.0)
    assert "lm_head" not in config["target_modules"] and len(config["target_modules"]) == 7


def test_digests_say_what_was_published(make: Make, tmp_path: Path) -> None:
    engine, batch = make(), stored(tmp_path, samples())
    before = engine.export_weights(0, "float32")
    update(engine, batch)
    after = engine.export_weights(1, "float32")
    assert engine.digest("float32") == after.digest != before.digest
    same = engine.compare(after, "float32")
    assert (same.digest, same.differing) == (after.digest, ())
    other = engine.compare(before, "float32")
    assert other.digest == after.digest
    changed = [one.name for one in other.differing]
    assert len(changed) == ADAPTED  # A has no gradient while B is 0
    assert all(name.endswith(".lora_B.weight") for name in changed)


def test_only_the_adapter_is_in_a_snapshot_and_comes_back_to_the_bit(
    make: Make, tmp_path: Path
) -> None:
    engine, batch = make(), stored(tmp_path, samples())
    fresh = engine.digest()
    update(engine, batch)
    engine.save_state(1)
    saved = engine.digest()
    update(engine, batch, 2)
    on = engine.digest()
    again = make()
    assert again.digest() == fresh
    again.load_state(1)
    assert again.digest() == saved
    update(again, batch, 2)
    assert again.digest() == on
    files = RunStore(Store(str(tmp_path / "store")), "run")
    index = json.loads(files.store.read(f"{files.state_key(1)}/index.json"))
    names = index["body"]["tensors"]
    assert len(names) == 3 * 2 * ADAPTED and all(".lora_" in name for name in names)


def test_an_adapter_begins_on_a_published_version(make: Make, tmp_path: Path) -> None:
    """Of the merged weights, as a run that goes on from another one's does."""
    engine, batch = make(), stored(tmp_path, samples())
    update(engine, batch)
    first = engine.export_weights(1, "float32")
    given = lora_spec(tmp_path, run="child").model_copy(update={"base": first})
    child = make(given)
    store = Store(str(tmp_path / "store"))
    published_base = child.export_weights(0, "float32")
    assert open_manifest(store, published_base).base == published_base.base is not None
    merged = dict(stream_whole(store, first))
    for name, tensor in stream(store, published_base.base):
        assert torch.equal(tensor, merged[name]), name
    fresh = child.digest()
    child.load_weights(first, 0)
    assert child.digest() == fresh
    np.testing.assert_allclose(
        logprobs(child, tmp_path, batch, "old_logprobs"),
        logprobs(engine, tmp_path, batch, "old_logprobs"),
        atol=2e-5,
    )


def test_another_model_than_the_published_base_is_refused(make: Make, tmp_path: Path) -> None:
    make().export_weights(0, "float32")
    other = lora_spec(tmp_path).model_copy(update={"model": MODEL.model_copy(update={"seed": 6})})
    with pytest.raises(WeightMismatch, match="Set model to what it was"):
        make(other).export_weights(1, "float32")


def test_some_layers_may_be_chosen(make: Make, tmp_path: Path) -> None:
    engine = make(lora_spec(tmp_path, LoraConfig(rank=2, target_modules=("q_proj", "v_proj"))))
    found = published(tmp_path, engine.export_weights(0, "float32"))
    assert len(found) == 2 * 2 * 2
    assert {name.split(".")[-3] for name in found} == {"q_proj", "v_proj"}


def test_a_layer_that_is_not_there_is_refused_by_name(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has query, and no linear layer.*gate_proj, k_proj"):
        make(lora_spec(tmp_path, LoraConfig(target_modules=("query",))))


def test_a_forward_pass_leaves_the_factors_that_are_published(make: Make, tmp_path: Path) -> None:
    """FSDP keeps bfloat16 copies for the next pass in the parameters' place; no version is of those."""
    engine = make(lora_spec(tmp_path, compute_dtype="bfloat16"))
    update(engine, stored(tmp_path, samples()))
    before = engine.digest("bfloat16")
    engine.score([[4, 5, 6, 7, 8, 9]], [2])
    assert engine.digest("bfloat16") == before
    weights = engine.export_weights(1, "bfloat16")
    assert weights.digest == before
    assert {tensor.dtype for tensor in published(tmp_path, weights).values()} == {torch.float32}


def test_a_fresh_beginning_after_a_forward_pass_is_one(make: Make, tmp_path: Path) -> None:
    """It is the factors that are set again, not FSDP's copies of them."""
    engine = make(lora_spec(tmp_path, compute_dtype="bfloat16"))
    fresh = engine.digest()
    update(engine, stored(tmp_path, samples()))
    engine.score([[4, 5, 6, 7, 8, 9]], [2])
    assert engine.digest() != fresh
    engine.score([[4, 5, 6, 7, 8, 9]], [2])
    reset(engine._loaded().model, engine._spec.seed)
    assert engine.digest() == fresh
