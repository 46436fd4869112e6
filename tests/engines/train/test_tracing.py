"""Sizes of a model that its code was gone through for, against what a train engine really keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import RwkvConfig

from benchmarks.families import make
from benchmarks.models import kept_by, plain
from configs.lora import LoraConfig
from configs.model import PretrainedModel
from configs.rollout import RolloutConfig
from configs.train import TrainConfig
from engines.models.checkpoints import build_empty, save
from engines.models.facts import model_facts
from engines.models.traced_shape import Amount, TracedShape
from engines.train import model_probes
from engines.train.fsdp_engine import FSDPEngine
from engines.train.memory_plan import (
    Batch,
    MemoryPlan,
    activation_bytes,
    largest_batch,
    plan_aggregator,
    plan_rank,
)
from engines.train.model_probes import BrokeOff, CachedChild, traced_shape
from engines.train.self_test.twin import build
from engines.train.tracing import fit, trace
from tasks.memory.holders import Vllm
from tests.engines.train.test_memory_plan import (
    GROUP,
    PROMPT,
    RESPONSE,
    ROWS,
    hooked,
    longest_rows,
    update_by,
)
from tests.engines.train.train_ranks import spec

__all__ = ["hooked"]
LONGEST = PROMPT + RESPONSE - 1
EXPERTS = LoraConfig(rank=12, target_parameters="all-experts")


def test_growth_is_told_apart() -> None:
    """5 bytes a token that sequences share once, 7 a slot, and 2 a pair of slots."""

    def kept(tokens: int, slots: int, longest: int) -> Amount:
        return Amount(0.0, 5.0 * tokens + 7.0 * slots + 2.0 * slots * longest)

    found = fit(kept(20, 20, 10), kept(40, 40, 20), kept(30, 40, 10), 10)
    assert (found.token.others, found.slot.others, found.pair.others) == (5.0, 7.0, 2.0)
    assert found.of(40, 60, 30, c=4) == 5 * 40 + 7 * 60 + 2 * 60 * 30


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


# What a plan may be off by: recurrent layers work in chunks, the rest is what is kept but once.
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Qwen3.5", {}),
        slow("GPT-J", {"compute_dtype": "bfloat16"}),
        ("gpt-oss", {"compute_dtype": "bfloat16"}),
        ("Gemma 4", {"lora": LoraConfig(rank=4)}),
        slow("MiniMax", {"compute_dtype": "bfloat16"}),
        slow("Gemma 3n", {}),
        slow("Falcon-H1", {"compute_dtype": "bfloat16"}),
        slow("LFM2", {"gradient_checkpointing": 0.5}),
        slow("GPT-2", {}),
        slow("Qwen2-MoE", {"compute_dtype": "bfloat16", "lora": LoraConfig(rank=8)}),
        slow("Qwen3-MoE", {"compute_dtype": "bfloat16", "lora": EXPERTS}),
        slow("gpt-oss", {"compute_dtype": "bfloat16", "lora": EXPERTS}),
        slow("StableLM", {}),
        slow("StarCoder 2", {}),
        slow("Mistral", {}),
        slow("OLMo 2", {"compute_dtype": "bfloat16"}),
        slow("GPT-NeoX", {"compute_dtype": "bfloat16"}),
    ],
)
def test_a_plan_of_any_family_is_what_an_update_keeps(
    tmp_path: Path, hooked: list[int], family: str, settings: dict[str, Any]
) -> None:
    lora = settings.get("lora")
    settings = {name: value for name, value in settings.items() if name != "lora"}
    model = PretrainedModel(path=str(make(family, tmp_path / "model")))
    facts = model_facts(model)
    assert facts is not None
    train = TrainConfig(**{"compute_dtype": "float32", "micro_batch_tokens": 4096, **settings})
    products = getattr(torch, train.compute_dtype)
    shape = trace(Path(model.path), LONGEST, products, lora)
    engine = FSDPEngine(
        spec(tmp_path, **settings).model_copy(update={"lora": lora, "model": model})
    )
    update_by(engine, longest_rows(tmp_path))
    held = engine.memory_held("host")
    engine.leave()

    largest = largest_batch(4096, PROMPT, RESPONSE, ROWS, GROUP, 1)
    plan = plan_rank(shape, train, largest, role="actor", ranks=1, on_gpu=False, lora=lora)
    assert plan.held["weights"] == held["weights"]
    assert plan.held["optimizer"] == held["optimizer"]
    kept = activation_bytes(shape, train, largest, products.itemsize, on_gpu=False, lora=lora)
    assert 0.97 <= kept / max(hooked) <= 1.08


@pytest.mark.parametrize(
    "family",
    ["Llama", "Qwen3", *map(slow, ("Granite", "Ministral 3", "Qwen2", "Seed-OSS", "SmolLM3"))],
)
def test_a_decoder_like_llamas_has_the_sizes_that_its_config_says(
    tmp_path: Path, family: str
) -> None:
    facts = model_facts(PretrainedModel(path=str(make(family, tmp_path))))
    assert facts is not None
    said = facts.shape
    assert said is not None
    seen = trace(tmp_path, 600, torch.bfloat16)
    whole = sum(weight.numel() for weight in _weights(tmp_path))
    assert seen.parameters == whole
    assert seen.inside == pytest.approx(said.inside, rel=0.01)  # norms of queries are in no shape
    assert (seen.hidden, seen.vocabulary, seen.tied, seen.heads, seen.layers) == (
        *(said.hidden, said.vocabulary, said.tied, said.heads, said.layers),
    )
    assert seen.cached_numbers() == said.cached_numbers()
    assert seen.state == 0
    train = TrainConfig(compute_dtype="bfloat16")
    batch = largest_batch(16384, 200, 400, 64, 8, 1)
    by_config, by_code = (
        activation_bytes(shape, train, batch, 2, on_gpu=False) for shape in (said, seen)
    )
    assert by_code == pytest.approx(by_config, rel=0.02)


def test_experts_that_are_spread_are_not_gathered(tmp_path: Path) -> None:
    """Four experts of 64 x 64 three times in each of four layers."""
    shape = trace(make("Qwen3-MoE", tmp_path), 64, torch.bfloat16)
    experts = 4 * 3 * 64 * 64
    assert [layer.experts for layer in shape.stack] == [experts] * 4
    batch = largest_batch(1024, 16, 16, 64, 8, 2)

    def planned(**settings: Any) -> MemoryPlan:
        train = TrainConfig(compute_dtype="bfloat16", **settings)
        return plan_rank(shape, train, batch, role="actor", ranks=2, on_gpu=True)

    for kept, settings in (
        (4, {}),  # in float32; what is multiplied is kept for the backward pass
        (1, {"gradient_checkpointing": True}),
        (0, {"weights_dtype": "bfloat16"}),
    ):
        gathered, spread = (planned(expert_parallel=n, **settings) for n in (1, 2))
        assert spread.held == gathered.held
        saved = gathered.passing["gathered"] - spread.passing["gathered"]
        assert saved == 2 * (2 * experts - kept * experts // 2)  # of two layers at once
    once = planned(expert_parallel=2, reduce_gradients="optimizer_step").passing["gradients"]
    assert once == 4 * (shape.parameters - 4 * experts // 2)


def test_a_layer_with_a_state_keeps_it_of_a_sequence(tmp_path: Path) -> None:
    """Of four layers one attends: keys and values of one head of 32; the others have states."""
    shape = trace(make("Qwen3.5", tmp_path), 64, torch.float32)
    assert shape.cached == 2 * 32
    # A convolution's last 4 columns of queries, keys and values, and a matrix for each head.
    assert shape.state == 3 * (4 * (2 * 2 * 32 + 4 * 32) + 4 * 32 * 32)
    assert shape.heads == 2
    assert not shape.divisible


def test_what_a_child_traced_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make("GPT-2", tmp_path / "model")
    model_probes._ask_once.cache_clear()
    seen = traced_shape(folder, LONGEST, "float32")
    assert seen == trace(folder, LONGEST, torch.float32)
    (file,) = (tmp_path / "cache" / "refrain" / "shapes").iterdir()
    assert TracedShape.from_json(json.loads(file.read_text())) == seen
    model_probes._ask_once.cache_clear()
    monkeypatch.setattr("sys.executable", "/bin/false")  # no child is asked again
    assert traced_shape(folder, LONGEST, "float32") == seen


def _weights(folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").values())


def test_a_code_that_breaks_off_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory plan asks for the sizes of a model many times."""
    folder = make("GPT-2", tmp_path / "model")
    asked: list[str] = []

    @contextmanager
    def begun(child: CachedChild[TracedShape]) -> Iterator[Callable[[], TracedShape]]:
        asked.append(child.module)
        yield lambda: (_ for _ in ()).throw(BrokeOff("broke off"))

    monkeypatch.setattr(CachedChild, "begun", begun)
    for _ in range(3):
        with pytest.raises(BrokeOff):
            traced_shape(folder, LONGEST, "bfloat16")
    assert len(asked) == 1


@pytest.mark.slow
def test_what_vllm_keeps_of_other_caches_is_not_told(tmp_path: Path) -> None:
    """Of layers with a state, without any attention, and with latent attention."""
    for family, known in (("Gemma 2", True), ("LFM2", False), ("Mamba 2", False)):
        shape = trace(make(family, tmp_path / family), 32, torch.bfloat16)
        assert shape.plain_cache == known
        settings = RolloutConfig(engine="vllm")
        engine = Vllm(
            role="rollout",
            whose="rollout",
            pool="rollout",
            settings=settings,
            named="rollout",
            shape=shape,
            longest=64,
        )
        assert (engine.share(2**30) is not None) == known
    assert not trace(make("DeepSeek V3", tmp_path / "latent"), 32, torch.bfloat16).plain_cache


def test_code_that_takes_one_token_after_the_other_is_seen_in_short(tmp_path: Path) -> None:
    """RWKV without its kernel; a few tokens tell what many keep."""
    config = RwkvConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, bos_token_id=1, eos_token_id=2
    )
    save(build(config), tmp_path)
    shape = trace(tmp_path, 600, torch.float32)
    assert shape.state > 0
    assert shape.cached == 0
    kept, packed = kept_by(plain(tmp_path, attention=None))
    batch = Batch(
        tokens=packed.tokens.numel(),
        slots=packed.layout.expand.numel(),
        responses=packed.labels.numel(),
        longest=48,
        several=False,
    )
    train = TrainConfig(compute_dtype="float32")
    planned = activation_bytes(shape, train, batch, 4, on_gpu=False)
    assert planned == pytest.approx(kept, rel=0.03)


def test_on_a_gpu_attention_keeps_its_result_once_more(tmp_path: Path) -> None:
    """As the formula of decoders like Llama's has it, by the plain path."""
    folder = make("Llama", tmp_path)
    facts = model_facts(PretrainedModel(path=str(folder)))
    assert facts is not None and facts.shape is not None
    seen = trace(folder, 600, torch.bfloat16)
    batch = largest_batch(16384, 200, 400, 64, 8, 1)
    train = TrainConfig(compute_dtype="bfloat16", kernels=False)
    said, found = (
        activation_bytes(shape, train, batch, 2, on_gpu=True) for shape in (facts.shape, seen)
    )
    assert found == pytest.approx(said, rel=0.02)
    without = activation_bytes(seen, train, batch, 2, on_gpu=False)
    assert without < 0.98 * said, "else this test could not fail"


def test_an_aggregator_adds_up_the_largest_weight(tmp_path: Path) -> None:
    """Of a mixture that is a layer's stacked experts, not the embedding."""
    shape = trace(make("Qwen3-MoE", tmp_path), 32, torch.bfloat16)
    largest = max(weight.numel() for weight in build_empty(tmp_path).parameters())
    assert largest > shape.vocabulary * shape.hidden
    plan = plan_aggregator(shape, TrainConfig(), on_gpu=False)
    assert plan.passing["sums"] == 3 * 4 * largest
