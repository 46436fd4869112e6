"""Adapters on experts of mixtures: against PEFT, merged, published, restored, refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.families import make as make_family
from configs.imports import imported_class
from configs.lora import LoraConfig
from configs.model import PretrainedModel
from configs.rollout import RolloutConfig
from engines.models.adapters import export_adapter, factor_names, stream_whole
from engines.rollout.contract import RolloutSpec, engine_class
from engines.train.contract import TrainSpec
from engines.train.fsdp_engine import FSDPEngine
from engines.train.model.fsdp import own_part
from engines.train.model.lora import adapted_experts, factors, take_factors
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from storage.runs.weights import StackedWeight, open_manifest, stream
from tests.engines.train import naive_training as naive
from tests.engines.train.conftest import Join
from tests.engines.train.model.test_lora import logprobs, update
from tests.engines.train.train_ranks import TEMPERATURE, samples, spec, stored

LORA = LoraConfig(rank=3, alpha=6.0, target_parameters="all-experts")
QUICK = ("Qwen3-MoE", "gpt-oss")  # [E, out, in], and [E, in, out] with a bias
SLOW = ("Mixtral", "Qwen2-MoE", "Qwen3-Next", "GLM 4 MoE", "DeepSeek V3")
FAMILIES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def experts_spec(
    folder: Path, family: str, lora: LoraConfig | None = LORA, **settings: object
) -> TrainSpec:
    directory = folder / "model"
    if not directory.exists():
        make_family(family, directory)
    model = PretrainedModel(path=str(directory))
    return spec(folder, **settings).model_copy(update={"lora": lora, "model": model})


def with_noise(engine: FSDPEngine) -> FSDPEngine:
    """The engine, its factors set to what changes each product by about as much as it is."""
    model, noise = engine._loaded().model, torch.Generator().manual_seed(3)
    drawn = factors(model)
    with torch.no_grad():
        for tensor in drawn.values():
            own_part(tensor)[0].copy_(0.1 * torch.randn(tensor.shape, generator=noise))
    take_factors(model, drawn)
    return engine


def naive_logprobs(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = torch.cat(naive.logprobs(model, samples(), TEMPERATURE)).numpy()
    return found


def exported(engine: FSDPEngine, folder: Path) -> Path:
    """An adapter of what the engine has now, as PEFT reads it."""
    weights = engine.export_weights(1, "float32")
    export_adapter(Store(str(folder / "store")), weights, folder / "adapter")
    return folder / "adapter"


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_computes_and_learns_the_same(family: str, join: Join, tmp_path: Path) -> None:
    """Log-probs, loss, norm and every factor after a step."""
    peft = pytest.importorskip("peft")
    engine = with_noise(join(experts_spec(tmp_path, family)))
    base = naive.load(str(tmp_path / "model"))
    plain = naive_logprobs(base)
    folder = exported(engine, tmp_path)
    model = peft.PeftModel.from_pretrained(base, folder, is_trainable=True)
    trained = {
        name.replace(".default", ""): one
        for name, one in model.named_parameters()
        if one.requires_grad
    }
    mine = factors(engine._loaded().model)
    assert {name: one.shape for name, one in mine.items()} == {
        name: one.shape for name, one in trained.items()
    }
    assert any(".experts.base_layer.lora_A." in name for name in mine)

    batch = stored(tmp_path, samples())
    got = logprobs(engine, tmp_path, batch, "old_logprobs")
    np.testing.assert_allclose(got, naive_logprobs(model), atol=1e-4)
    assert np.abs(got - plain).max() > 1

    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0)
    loss, norm = naive.grpo_step(
        model, optimizer, samples(), temperature=TEMPERATURE, max_grad_norm=1.0
    )
    metrics = update(engine, batch, 2)
    assert metrics["train/loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, tensor in factors(engine._loaded().model).items():
        gap = (own_part(tensor)[0] - trained[name]).abs()
        assert (gap > 1e-4).float().mean() <= 0.01 and gap.max() <= 2e-3, name


def test_peft_does_not_take_layers_beside_the_experts_for_experts(
    join: Join, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    linear = LORA.model_copy(update={"target_parameters": ()})
    engine = with_noise(join(experts_spec(tmp_path, "GLM 4 MoE", linear)))
    folder = exported(engine, tmp_path)
    model = peft.PeftModel.from_pretrained(naive.load(str(tmp_path / "model")), folder)
    got = logprobs(engine, tmp_path, stored(tmp_path, samples()), "old_logprobs")
    np.testing.assert_allclose(got, naive_logprobs(model), atol=1e-4)


def test_some_weights_may_be_chosen_by_the_ends_of_their_names(join: Join, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    chosen = ("mlp.experts.down_proj", "layers.1.mlp.experts.gate_up_proj")
    lora = LoraConfig(rank=2, target_modules=(), target_parameters=chosen)
    engine = with_noise(join(experts_spec(tmp_path, "gpt-oss", lora)))
    assert len(factors(engine._loaded().model)) == 2 * (4 + 1)
    folder = exported(engine, tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["target_modules"], config["target_parameters"]) == ([], sorted(chosen))
    model = peft.PeftModel.from_pretrained(naive.load(str(tmp_path / "model")), folder)
    got = logprobs(engine, tmp_path, stored(tmp_path, samples()), "old_logprobs")
    np.testing.assert_allclose(got, naive_logprobs(model), atol=1e-4)


@pytest.mark.parametrize("family", QUICK)
def test_fresh_adapters_change_nothing_and_the_reference_is_the_base_to_the_bit(
    family: str, join: Join, tmp_path: Path
) -> None:
    rows = [[4, 5, 6, 7, 8, 9], [9, 8, 7]]
    engine, batch = join(experts_spec(tmp_path, family)), stored(tmp_path, samples())
    frozen = join(experts_spec(tmp_path, family, None, role="ref"))
    assert engine.score(rows, [2, 1]) == frozen.score(rows, [2, 1])
    with_noise(engine)
    assert engine.score(rows, [2, 1]) != frozen.score(rows, [2, 1])
    mine, wanted = (logprobs(one, tmp_path, batch, "ref_logprobs") for one in (engine, frozen))
    assert mine.tolist() == wanted.tolist()


@pytest.mark.parametrize("family", QUICK)
def test_each_expert_is_merged_with_its_own_factors(
    family: str, join: Join, tmp_path: Path
) -> None:
    """By PEFT's formula, for a version's weights, and for what it is computed with."""
    engine = with_noise(join(experts_spec(tmp_path, family)))
    weights = engine.export_weights(1, "float32")
    store = Store(str(tmp_path / "store"))
    manifest = open_manifest(store, weights)
    assert manifest.adapter is not None and manifest.base is not None
    base, given = dict(stream(store, manifest.base)), dict(stream(store, weights))
    whole = dict(stream_whole(store, weights))
    experts = manifest.adapter.experts
    assert [one.name.rpartition(".")[2] for one in experts] == ["gate_up_proj", "down_proj"] * 4
    for one in experts:
        a, b = (given[name] for name in factor_names(one.name, experts))
        a, b = a.reshape(4, LORA.rank, -1), b.reshape(len(b), LORA.rank, 4)
        order = "e i o" if one.transposed else "e o i"
        change = LORA.scale * torch.einsum(f"o r e, e r i -> {order}", b, a)
        torch.testing.assert_close(whole[one.name], base[one.name] + change, atol=1e-6, rtol=0)
    model = naive.load(str(tmp_path / "model"))
    model.load_state_dict(whole)
    got = logprobs(engine, tmp_path, stored(tmp_path, samples()), "old_logprobs")
    np.testing.assert_allclose(got, naive_logprobs(model), atol=1e-4)


def test_peft_wraps_once_for_each_weight_of_a_module() -> None:
    experts = [
        StackedWeight(name=f"model.layers.{layer}.mlp.experts.{weight}", transposed=False)
        for layer in (0, 1)
        for weight in ("gate_up_proj", "down_proj")
    ]
    inner, outer = (factor_names(one.name, experts)[0] for one in experts[:2])
    assert inner == "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
    assert outer == "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    assert factor_names(experts[0].name, experts[:1])[0] == outer


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *(("transformers", family) for family in QUICK),
        pytest.param("vllm", "Mixtral", marks=[pytest.mark.vllm, pytest.mark.slow]),
    ],
)
def test_rollout_engines_compute_what_the_trainer_does(
    kind: str, family: str, join: Join, tmp_path: Path
) -> None:
    if kind == "vllm":
        pytest.importorskip("vllm")
    engine = with_noise(join(experts_spec(tmp_path, family)))
    settings = RolloutConfig(engine=kind, dtype="float32", kv_cache_gib=0.1, seed=1)
    sampler = imported_class(engine_class(settings))(
        RolloutSpec(
            name="sampler",
            model=PretrainedModel(path=str(tmp_path / "model")),
            model_cache=str(tmp_path / "models"),
            rollout=settings,
            store_uri=Store(str(tmp_path / "store")).uri,
            max_model_len=64,
        )
    )
    try:
        rows = [list(range(4, 20)), [30, 8, 77, 12, 5, 61]]
        for version in (1, 2):  # the second by way of the base that is held
            weights = engine.export_weights(version, "float32")
            report = sampler.sync(weights)
            assert (report.version, report.digest) == (version, weights.digest)
            for mine, theirs in zip(
                engine.score(rows, [2, 1]), sampler.score(rows, [2, 1]), strict=True
            ):
                assert theirs == pytest.approx(mine, abs=1e-4)
            update(engine, stored(tmp_path, samples(), f"batch-{version}"), version + 1)
    finally:
        sampler.close()


def test_only_the_factors_are_in_a_snapshot_and_come_back_to_the_bit(
    join: Join, tmp_path: Path
) -> None:
    given, batch = experts_spec(tmp_path, "Qwen3-MoE"), stored(tmp_path, samples())
    engine = with_noise(join(given))
    update(engine, batch)
    engine.save_state(1)
    saved = engine.digest()
    update(engine, batch, 2)
    again = join(given)
    again.load_state(1)
    assert again.digest() == saved
    update(again, batch, 2)
    assert again.digest() == engine.digest()
    files = RunStore(Store(str(tmp_path / "store")), "run")
    index = json.loads(files.store.read(f"{files.state_key(1)}/index.json"))
    names = index["body"]["tensors"]
    assert len(names) == 3 * 2 * 4 * (4 + 2) and all(".lora_" in name for name in names)


def test_a_versions_values_are_taken_over(join: Join, tmp_path: Path) -> None:
    engine, other = (join(experts_spec(tmp_path, "gpt-oss")) for _ in range(2))
    weights = with_noise(engine).export_weights(1, "float32")
    assert other.digest("float32") != weights.digest
    assert other.agree(weights) == len(
        open_manifest(Store(str(tmp_path / "store")), weights).tensors
    )
    assert other.digest("float32") == weights.digest
    assert other.agree(weights) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": 1.0},
        {"gradient_checkpointing": 0.5, "recompute": "selective"},
        {"compute_dtype": "bfloat16", "weights_dtype": "bfloat16"},
    ],
)
def test_settings_that_leave_the_bits_leave_those_of_experts(
    settings: dict[str, object], join: Join, tmp_path: Path
) -> None:
    format_ = str(settings.get("compute_dtype", "float32"))
    batch = stored(tmp_path, samples())
    found = []
    for given in ({"compute_dtype": format_}, settings):
        engine = join(experts_spec(tmp_path, "gpt-oss", **given))
        for step in (1, 2):
            update(engine, batch, step)
        found.append(engine.digest())
    assert found[0] == found[1]


def test_names_that_experts_have_not_are_refused_with_those_that_they_have(
    join: Join, tmp_path: Path
) -> None:
    wrong = LoraConfig(target_parameters=("experts.w1",))
    with pytest.raises(ValueError, match=r"has experts\.w1, .* are down_proj, gate_up_proj\."):
        join(experts_spec(tmp_path, "Qwen3-MoE", wrong))
    dense = spec(tmp_path).model_copy(update={"lora": LORA})
    with pytest.raises(ValueError, match=r"none of a form that is known. Set lora.target_param"):
        join(dense)


def test_adapted_weights_are_in_the_order_of_the_model(join: Join, tmp_path: Path) -> None:
    engine = join(experts_spec(tmp_path, "Qwen3-MoE"))
    module = engine._loaded().model
    names = [one.name for one in adapted_experts(module).values()]
    own = [name for name in module.state_dict() if name in names]
    assert names == own and len(names) == 2 * 4
