"""The memory plan against what a train engine really holds."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from configs.algorithm.algorithm import AlgorithmConfig
from configs.lora import LoraConfig
from configs.model import PretrainedModel
from configs.train import TrainConfig
from engines.models.checkpoints import build_empty, materialize
from engines.models.facts import ModelShape, model_facts
from engines.models.traced_shape import adapter_parameters
from engines.train import logprobs, memory_plan, updater
from engines.train.contract import UpdateRequest
from engines.train.fsdp_engine import FSDPEngine
from engines.train.memory_plan import (
    LIBRARIES,
    PRIMITIVES,
    Batch,
    MemoryPlan,
    activation_bytes,
    buffer_bytes,
    largest_batch,
    largest_turns,
    most_resident,
    plan_rank,
)
from engines.train.model import attention
from engines.train.model.lora import inject
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from tests.engines.train import test_images as images
from tests.engines.train.train_ranks import MODEL, TEMPERATURE, spec

PROMPT, RESPONSE, GROUPS, GROUP = 40, 24, 4, 4
ROWS = GROUPS * GROUP
ROUNDED = {"compute_dtype": "bfloat16", "weights_dtype": "bfloat16"}


def shape_of(model: Any = MODEL) -> ModelShape:
    facts = model_facts(model)
    assert facts is not None
    assert facts.shape is not None
    return facts.shape


def longest_rows(folder: Path) -> BatchRef:
    """A batch of rows as long as they may be."""
    random = np.random.default_rng(0)
    prompts = [random.integers(4, 90, PROMPT) for _ in range(GROUPS)]
    columns: dict[str, object] = {
        "prompt_ids": [prompts[row // GROUP] for row in range(ROWS)],
        "response_ids": [random.integers(4, 90, RESPONSE) for _ in range(ROWS)],
        "advantages": [np.ones(RESPONSE, dtype=np.float32) for _ in range(ROWS)],
        "group_id": np.repeat(np.arange(GROUPS), GROUP),
    }
    return write_batch(Store(str(folder / "store")), "run/batch.safetensors", columns)


def update_by(engine: FSDPEngine, batch: BatchRef) -> None:
    """The engine alone makes its first update."""
    engine.join(0, 1, "127.0.0.1", 0, 1, 60.0)
    engine.update(
        UpdateRequest(
            step=1,
            batch=batch,
            algorithm=AlgorithmConfig(),
            temperature=TEMPERATURE,
            max_new_tokens=RESPONSE,
        )
    )


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that autograd keeps of each micro-batch, weights left out."""
    found: list[int] = []

    class Counting(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, wanted: bool) -> None:
            self.kept: dict[int, int] = {}
            super().__init__(self.pack, lambda tensor: tensor)

        def pack(self, tensor: torch.Tensor) -> torch.Tensor:
            weight = torch.nn.Parameter
            if not isinstance(tensor, weight) and not isinstance(tensor._base, weight):
                storage = tensor.untyped_storage()
                self.kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        def __exit__(self, *given: object) -> None:
            found.append(sum(self.kept.values()))
            super().__exit__(*given)

    monkeypatch.setattr(updater, "kept_on_host", Counting)
    return found


def test_the_model_has_as_many_weights_as_its_shape_says(tmp_path: Path) -> None:
    model = build_empty(materialize(MODEL, tmp_path))
    assert shape_of().parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"micro_batch_tokens": 140},  # a group
        {"gradient_checkpointing": 0.5},
        {"compute_dtype": "bfloat16"},
        {"lora": LoraConfig(rank=4)},
        ROUNDED,
        {"lora": LoraConfig(rank=4), **ROUNDED},
        {"optimizer_dtype": "8bit"},
        {**ROUNDED, "master_weights": "remainder"},
        {"lora": LoraConfig(rank=4), **ROUNDED, "master_weights": "remainder"},
    ],
)
def test_activations_weights_and_moments_are_what_the_plan_says(
    tmp_path: Path, hooked: list[int], settings: dict[str, Any]
) -> None:
    lora = settings.get("lora")
    settings = {name: value for name, value in settings.items() if name != "lora"}
    engine = FSDPEngine(spec(tmp_path, **settings).model_copy(update={"lora": lora}))
    update_by(engine, longest_rows(tmp_path))
    held = engine.memory_held("host")
    engine.leave()

    train = TrainConfig(**{"compute_dtype": "float32", "micro_batch_tokens": 4096, **settings})
    largest = largest_batch(train.micro_batch_tokens, PROMPT, RESPONSE, ROWS, GROUP, 1)
    plan = plan_rank(shape_of(), train, largest, role="actor", ranks=1, on_gpu=False, lora=lora)
    assert plan.held["weights"] == held["weights"]
    # Norms and the smallest matrices are whole numbers where others are in fewer bits.
    near = 0.02 if {"optimizer_dtype", "master_weights"} & settings.keys() else 0
    assert plan.held["optimizer"] == pytest.approx(held["optimizer"], rel=near, abs=0)
    masters = plan.held.get("master weights", 0)
    assert masters == pytest.approx(held.get("master weights", 0), rel=near, abs=0)
    assert ("master weights" in held) == (train.weights_dtype == "bfloat16")
    bytes_of = 2 if train.compute_dtype == "bfloat16" else 4
    kept = activation_bytes(shape_of(), train, largest, bytes_of, on_gpu=False, lora=lora)
    assert largest.several == (len(hooked) > 1)
    assert kept == pytest.approx(max(hooked), rel=0.05)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_norms_of_queries_and_keys_are_in_the_plan(
    tmp_path: Path, hooked: list[int], lora: LoraConfig | None
) -> None:
    """Of a Qwen3 model with heads that are together wider than the model, as the published ones."""
    folder = tmp_path / "qwen3"
    shutil.copytree(materialize(MODEL, tmp_path), folder)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    config = Qwen3Config(
        vocab_size=len(AutoTokenizer.from_pretrained(folder)),
        num_attention_heads=4,
        num_key_value_heads=2,
        **sizes,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    model = PretrainedModel(path=str(folder))
    shape = shape_of(model)
    assert shape.head_norms and not shape_of().head_norms
    engine = FSDPEngine(spec(tmp_path).model_copy(update={"lora": lora, "model": model}))
    update_by(engine, longest_rows(tmp_path))
    engine.leave()
    train = TrainConfig(compute_dtype="float32", micro_batch_tokens=4096)
    largest = largest_batch(4096, PROMPT, RESPONSE, ROWS, GROUP, 1)
    kept, without = (
        activation_bytes(one, train, largest, 4, on_gpu=False, lora=lora)
        for one in (shape, replace(shape, head_norms=False))
    )
    assert kept == pytest.approx(max(hooked), rel=0.05)
    assert without != pytest.approx(max(hooked), rel=0.05), "else this test could not fail"


def test_the_largest_micro_batch() -> None:
    # Two groups of four: each a prompt of 8 once, and 4 x (6 - 1) response tokens: 28.
    assert largest_batch(4096, 8, 6, samples=8, group=4, ranks=1) == Batch(
        tokens=56, slots=8 * 13 + 1, responses=48, longest=13, several=False
    )
    assert largest_batch(30, 8, 6, samples=8, group=4, ranks=1) == Batch(
        tokens=28, slots=4 * 13 + 1, responses=24, longest=13, several=True
    )
    assert largest_batch(4096, 8, 6, samples=8, group=4, ranks=8) == Batch(
        tokens=13, slots=14, responses=6, longest=13, several=False
    )


def test_forests_fill_the_slots_of_their_paths_as_far_as_plans_allow() -> None:
    """Episodes of up to 20 tokens after a prompt of 8, whose paths have up to 14."""
    few = largest_batch(4096, 8, 20, samples=2, group=2, ranks=1, paths=3, path=14)
    assert few == Batch(tokens=46, slots=2 * 3 * 13 + 1, responses=40, longest=13, several=False)
    many = largest_batch(46, 8, 20, samples=40, group=2, ranks=1, paths=30, path=14)
    assert (many.tokens, many.slots, many.longest) == (46, 8 * 46 + 1, 13)


@pytest.mark.parametrize(
    "settings", [{}, {"micro_batch_tokens": 320}, {"gradient_checkpointing": 1}]
)
def test_what_a_policy_that_looks_keeps_is_what_the_plan_says(
    tmp_path: Path, hooked: list[int], settings: dict[str, Any]
) -> None:
    """Episodes of three turns of two tokens, after images of which no two are alike."""
    random = np.random.default_rng(0)
    rows = [
        images.Row(
            prompt=[1, *range(4, 12)],
            turns=random.integers(*images.ACTIONS, (3, 2)).tolist(),
            frames=random.integers(0, 256, (3, 20, 24, 3), np.uint8),
            advantage=1.0,
        )
        for _ in range(12)
    ]
    engine = FSDPEngine(images.spec(tmp_path, **settings))
    engine.join(0, 1, "127.0.0.1", 0, 1, 60.0)
    engine.update(
        UpdateRequest(
            step=1,
            batch=images.stored(tmp_path, rows),
            algorithm=AlgorithmConfig(),
            temperature=TEMPERATURE,
            max_new_tokens=24,
        )
    )
    held = engine.memory_held("host")
    engine.leave()
    train = TrainConfig(**{"compute_dtype": "float32", "micro_batch_tokens": 4096, **settings})
    largest = largest_turns(train.micro_batch_tokens, 9, 2, 3, images.PATCHES, 12, 1)
    shape = shape_of(images.MODEL)
    plan = plan_rank(shape, train, largest, role="actor", ranks=1, on_gpu=False)
    assert plan.held["weights"] == held["weights"] and plan.held["optimizer"] == held["optimizer"]
    assert largest.several == (len(hooked) > 1) and largest.images == 36 // len(hooked)
    blind = plan_rank(
        replace(shape, vision=None), train, largest, role="actor", ranks=1, on_gpu=False
    )
    assert plan.passing["activations"] > 1.1 * blind.passing["activations"]
    assert plan.passing["activations"] == pytest.approx(max(hooked), rel=0.1)


HOST = {
    "weights_dtype": "bfloat16",
    "optimizer_device": "host",
    "gradient_checkpointing": 1.0,
}
HERE = {"optimizer_dtype": "bfloat16", "gradient_checkpointing": 1.0, "logit_chunk_tokens": 2048}
# layers, width, heads, key heads, MLP width, words: those of Qwen2.5, and Qwen3's of heads of 128
SIZES = {
    "0.5b": (24, 896, 14, 2, 4864, 151936),
    "1.5b": (28, 1536, 12, 2, 8960, 151936),
    "7b": (28, 3584, 28, 4, 18944, 152064),
    "0.6b": (28, 1024, 16, 8, 3072, 151936),
}
SEEN = {
    name: ModelShape(
        hidden=width,
        layers=layers,
        intermediate=inner,
        heads=heads,
        kv_heads=keys,
        head_size=128 if name == "0.6b" else width // heads,
        vocabulary=words,
        tied=name != "7b",
        head_norms=name == "0.6b",
    )
    for name, (layers, width, heads, keys, inner, words) in SIZES.items()
}


def planned(ranks: int = 1, role: str = "actor", gpu: bool = True, **settings: Any) -> Any:
    shape = ModelShape(
        hidden=2048,
        layers=16,
        intermediate=8192,
        heads=32,
        kv_heads=8,
        head_size=64,
        vocabulary=128_256,
        tied=True,
    )
    train = TrainConfig(**{"micro_batch_tokens": 8192, "compute_dtype": "bfloat16", **settings})
    batch = largest_batch(train.micro_batch_tokens, 512, 1024, 512, 8, ranks)
    return plan_rank(shape, train, batch, role=role, ranks=ranks, on_gpu=gpu)


def test_each_setting_makes_less_of_what_it_is_for() -> None:
    plain = planned()
    assert planned(gradient_checkpointing=1).passing["activations"] < (
        0.2 * plain.passing["activations"]
    )
    assert planned(micro_batch_tokens=4096).passing["activations"] == pytest.approx(
        plain.passing["activations"] / 2, rel=0.15
    )
    assert planned(optimizer_dtype="bfloat16").held["optimizer"] == plain.held["optimizer"] // 2
    assert planned(logit_chunk_tokens=256).passing["logits"] < plain.passing["logits"]
    pair = planned(2)
    assert planned(2, reshard_after_forward=False).passing["gathered"] > pair.passing["gathered"]
    products = planned(gradient_checkpointing=1, recompute="selective").passing["activations"]
    whole = planned(gradient_checkpointing=1).passing["activations"]
    assert 2 * whole < products < 0.8 * plain.passing["activations"]
    assert planned(kernels=False).passing["activations"] > 1.2 * plain.passing["activations"]
    away = planned(optimizer_device="host", activation_offload=True)
    assert away.held["optimizer"] == 0
    assert away.host["optimizer"] == plain.held["optimizer"]
    assert away.host["activations"] == plain.passing["activations"]
    assert away.peak < plain.peak
    rounded = planned(weights_dtype="bfloat16")
    assert rounded.held["weights"] == plain.held["weights"]
    assert rounded.host["master weights"] == plain.held["master weights"]
    gone = plain.held["master weights"]
    assert plain.stages["backward"] - rounded.stages["backward"] == gone
    halves = planned(weights_dtype="bfloat16", master_weights="remainder")
    assert halves.held["master weights"] == plain.held["master weights"] // 2
    assert "master weights" not in halves.host
    coded = planned(optimizer_dtype="8bit").held["optimizer"]
    assert 0.25 < coded / plain.held["optimizer"] < 0.26
    several, fewer = planned(2), planned(2, weights_dtype="bfloat16")
    assert fewer.held["weights"] == several.held["weights"] // 2


@pytest.mark.parametrize(
    ("model", "rows", "settings", "measured"),
    [
        ("0.5b", 101, {}, 37.24),
        ("1.5b", 50, {}, 85.15),
        ("0.5b", 101, {"logit_chunk_tokens": 8192}, 43.25),
        ("7b", 64, {"micro_batch_tokens": 16384, **HOST}, 50.13),
        ("7b", 160, {"micro_batch_tokens": 8192, "recompute": "selective", **HOST}, 69.77),
        ("7b", 160, {"micro_batch_tokens": 8192, "recompute": "selective", **HERE}, 127.85),
        ("0.6b", 1, {"micro_batch_tokens": 65536}, 95.97),
        ("0.6b", 1, {"micro_batch_tokens": 65536, "logit_chunk_tokens": 16384}, 112.16),
    ],
)
def test_a_lone_gpu_takes_what_an_h200_was_seen_to_take(
    model: str, rows: int, settings: dict[str, Any], measured: float
) -> None:
    """Peaks in GiB of benchmarks.gpu_update on 2026-11-26, on two machines; micro-batches as full as they were there."""
    train = TrainConfig(**{"compute_dtype": "bfloat16", "micro_batch_tokens": 32768, **settings})
    batch = largest_batch(train.micro_batch_tokens, 256, 1024, 160, 8, 1)
    if train.micro_batch_tokens == 32768:  # four micro-batches of 25,700 tokens, 33,000 slots
        batch = replace(batch, tokens=25_800, slots=33_000, responses=24_800, several=True)
    if rows == 1:  # a sequence of 61,779 tokens
        batch = replace(batch, tokens=61_779, slots=61_779, responses=60_755, several=False)
    plan = plan_rank(SEEN[model], train, batch, role="actor", ranks=1, on_gpu=True)
    assert plan.peak / 2**30 == pytest.approx(measured, rel=0.05)


def test_ranks_share_weights_and_replicas_do_not() -> None:
    one, four, copies = planned(), planned(4), planned(4, replicas=2)
    assert four.held["weights"] == one.held["master weights"] // 4
    assert copies.held["weights"] == one.held["master weights"] // 2
    once = planned(4, reduce_gradients="optimizer_step")
    assert once.passing["gradients"] == one.passing["gradients"]
    reference = planned(role="ref")  # in bfloat16, since it never changes
    assert reference.held == {"weights": one.held["weights"]}
    assert reference.peak < one.peak


def test_the_engines_own_limits_on_a_cpu_are_known() -> None:
    assert memory_plan.CACHED_LOGITS == logprobs.CACHED_LOGITS
    assert memory_plan.FUSED == logprobs.FUSED
    assert memory_plan.SHORT == attention.SHORT


def test_an_adapter_alone_has_gradients_and_moments(tmp_path: Path) -> None:
    lora = LoraConfig(rank=4)
    model = build_empty(materialize(MODEL, tmp_path))
    inject(model, lora)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert adapter_parameters(shape_of(), lora) == trained
    part = LoraConfig(rank=4, target_modules=("q_proj", "down_proj"))
    assert 0 < adapter_parameters(shape_of(), part) < trained

    batch = largest_batch(4096, PROMPT, RESPONSE, GROUPS * GROUP, GROUP, 1)
    train = TrainConfig(compute_dtype="float32")
    whole, adapted = (
        plan_rank(shape_of(), train, batch, role="actor", ranks=1, on_gpu=False, lora=one)
        for one in (None, lora)
    )
    assert adapted.held["weights"] == whole.held["weights"] + 4 * trained
    assert adapted.held["optimizer"] == 8 * trained
    assert adapted.passing["gradients"] == 4 * trained
    assert adapted.passing["head"] == 0


def test_buffers_are_as_long_as_a_layer() -> None:
    # Ten layers of 100 bytes: a buffer of the shard and one of the whole, for gathering or reducing.
    assert buffer_bytes(10, 100, 0, 1) == 10 * (100 + 100)  # an adapter's base: gathered alone
    assert buffer_bytes(10, 50, 100, 1) == 10 * (100 + 100)  # gathered in bfloat16
    assert buffer_bytes(10, 100, 100, 4) == 10 * (100 + 25 + 100)  # and Gloo's copy


def test_resident_memory_is_more_than_tensors_by_what_the_heap_loses() -> None:
    passing = {"gathered": 100, "activations": 200, "logits": 30, "one layer": 50}
    given = {"held": 1000, "passing": passing, "forward": 500, "buffers": 70, "table": 7}
    assert most_resident(0, **given) == 1000 + 100 + 200 + 50 + 100 + 70 + 7
    assert most_resident(5000, **given) == 5000
    shape, batch = shape_of(), largest_batch(4096, PROMPT, RESPONSE, ROWS, GROUP, 1)

    def plan(gpu: bool = False, lora: LoraConfig | None = None, **settings: Any) -> MemoryPlan:
        train = TrainConfig(**{"compute_dtype": "float32", **settings})
        return plan_rank(shape, train, batch, role="actor", ranks=1, on_gpu=gpu, lora=lora)

    whole = plan()
    assert whole.resident == whole.peak + whole.holes + LIBRARIES
    assert plan(gpu=True).holes == 0
    # An adapter's base has no gradients to reduce, but is gathered.
    layers = 4 * shape.layers * shape.layer_parameters
    assert 2 * layers < plan(lora=LoraConfig(rank=4)).holes
    # Kept or not, what a layer gives out leaves pieces behind.
    fewer = plan(gradient_checkpointing=1)
    assert fewer.peak < whole.peak and fewer.holes >= whole.holes
    assert plan(compute_dtype="bfloat16").holes > PRIMITIVES
